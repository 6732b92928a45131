"""Finding the user's line: the innermost frame that belongs neither to PyTorch nor to ampguard.

Judging a code object by its file is done once and remembered, because the glue tape asks for every operator.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from ampguard.capture.record import Line, ModulesAround

_HIDDEN_ROOTS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__))
)
_GENERATED = ("<frozen", "<eval_with_key")
"""Modules inside the interpreter, and the code of `torch.fx` graphs (`<eval_with_key>.3`): no file that anybody wrote."""

_HANDLERS = frozenset({"__torch_function__", "__torch_dispatch__"})
"""Through these a tensor's class or a mode passes on what was called in the frame above."""

_WRAPPERS = tuple(
    os.sep + os.path.join(*path.split("/"))
    for path in (
        "accelerate/hooks.py",
        "accelerate/utils/operations.py",
        "lightning/fabric/",
        "lightning_fabric/",
        "lightning_utilities/core/",
    )
)
"""Where a framework passes the call of a model along that it has wrapped: the line that it is about stands further out."""

MAX_LINES = 1 << 14
MAX_FILES = 1 << 12
MAX_FRAMES = 100
_has_lines: dict[int, tuple[bool, CodeType]] = {}
"""Whether a code's lines are shown, by identity, as in the next one."""
_hidden_files: set[str] = set()
"""Files none of whose code is the user's: a name is found at once, where a code's identity has to be asked for."""
_is_user: dict[int, tuple[bool, CodeType]] = {}
"""By identity: to hash a code object is to hash all of its code. The object is kept, so that its identity stays its own."""


_lines: dict[tuple[int, int], Line] = {}
"""By the identity of the code and the instruction. The line's code is kept with it, so that its identity stays its own."""


_met = [0]


def lines_met() -> int:
    """Lines that were met for the first time so far: a loop meets all of its own in its first steps, but for what it runs
    seldom."""
    return _met[0]


def forget_lines() -> None:
    """A run begins: all lines are yet to be met."""
    _lines.clear()


def is_own_file(file: str) -> bool:
    """Whether the file is ampguard's."""
    return file.startswith(_HIDDEN_ROOTS[1])


def is_user_file(file: str) -> bool:
    """Whether the file belongs neither to PyTorch nor to ampguard, and somebody wrote it."""
    hidden = file.startswith((*_HIDDEN_ROOTS, *_GENERATED)) or file == "<string>"
    return not hidden and "__torch_package__" not in file


def is_user_code(code: CodeType) -> bool:
    """Whether a frame of this code may be shown as the user's line (their script or a library such as transformers)."""
    known = _is_user.get(id(code))
    if known is None:
        is_users_file = is_user_file(code.co_filename)
        if not is_users_file and len(_hidden_files) < MAX_FILES:
            _hidden_files.add(code.co_filename)
        is_user = is_users_file and code.co_name not in _HANDLERS
        known = _is_user[id(code)] = (is_user, code)
    return known[0]


def _shows_lines(code: CodeType) -> bool:
    """Whether this is user code and not where a framework passes a call along."""
    is_shown = is_user_code(code) and not any(path in code.co_filename for path in _WRAPPERS)
    _has_lines[id(code)] = (is_shown, code)
    return is_shown


def user_line(frame: FrameType | None = None, stop: CodeType | None = None) -> Line | None:
    """The user's line above `frame` (default: the caller); None where there is none, or none below a frame of `stop`."""
    current = frame if frame is not None else sys._getframe(1)
    if stop is None and current is not None and current.f_code.co_filename not in _hidden_files:
        line = _lines.get((id(current.f_code), current.f_lasti))
        if line is not None:
            return line
    known_codes = _has_lines
    while current is not None:
        code = current.f_code
        if code is stop:
            return None
        if code.co_filename in _hidden_files:
            current = current.f_back  # type: ignore[assignment]
            continue
        known = known_codes.get(id(code))
        if known[0] if known is not None else _shows_lines(code):
            key = (id(code), current.f_lasti)
            line = _lines.get(key)
            if line is None:
                if len(_lines) > MAX_LINES:
                    _lines.clear()
                _met[0] += 1
                line = _lines[key] = Line(code, current.f_lineno, _met[0])
            return line
        current = current.f_back  # type: ignore[assignment]
    return None


def user_frame(frame: FrameType) -> FrameType:
    """The innermost frame of user code from `frame` on outwards; `frame` itself where there is none."""
    current: FrameType | None = frame
    while current is not None and (current.f_code.co_filename in _hidden_files or not is_user_code(current.f_code)):
        current = current.f_back
    return current if current is not None else frame


def frames_up(frame: FrameType | None, most: int) -> Iterator[FrameType]:
    """A frame and those that it was called from, so many at the most."""
    for _ in range(most):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


_ended_by: list[BaseException] = []
"""What has ended the script, while that is looked into."""


@contextlib.contextmanager
def left_by(error: BaseException | None) -> Iterator[None]:
    """The script has come to its end by an exception, or without one: its frames are those of the traceback."""
    _ended_by.extend([] if error is None else [error])
    try:
        yield
    finally:
        _ended_by.clear()


def frames_here(frame: FrameType | None, most: int) -> Iterator[FrameType]:
    """A frame and those that it was called from; where an exception has left others, these first, the innermost of them
    to begin with (a script that ends with `sys.exit` on a bad loss)."""
    left: list[FrameType] = []
    trace = getattr(_ended_by[-1] if _ended_by else sys.exc_info()[1], "__traceback__", None)
    while trace is not None:
        left.append(trace.tb_frame)
        trace = trace.tb_next
    yield from reversed(left[-most:])
    yield from frames_up(frame, most)


def modules_around(frame: FrameType) -> ModulesAround | None:
    """The modules whose calls `frame` runs in."""
    found = []
    for each in frames_up(frame, MAX_FRAMES):
        code = each.f_code
        if code.co_name in ("forward", "_call_impl") and code.co_argcount:
            module = locals_of(each).get(code.co_varnames[0])
            if isinstance(module, torch.nn.Module):
                found.append(module)
    return ModulesAround(weakref.ref(found[-1]), weakref.ref(found[0])) if found else None


def locals_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame by name.

    Up to Python 3.12 a function's frame keeps what it was once asked for, and with it every object that was in a variable
    then, for as long as the function runs (a training loop: for ever). What nobody else holds is emptied again.
    """
    names = frame.f_locals
    found = dict(names)
    is_copy = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and type(names) is dict
    if is_copy and sys.getrefcount(names) <= 3:  # the frame, `names`, and the argument of this call
        names.clear()
    return found
