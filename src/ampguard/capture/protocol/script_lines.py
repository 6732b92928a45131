"""The line of a protocol call: the user's own, rather than the framework's that makes the call for them.

`opt.step()` in a LightningModule ends in Lightning's precision plugin; what has to be changed stands in the former.
"""

from __future__ import annotations

import linecache
import os
import re
import site
from collections.abc import Collection
from types import CodeType, FrameType

from ampguard.capture.frames import is_user_code
from ampguard.capture.record import Line

_LIBRARY_ROOTS = tuple(path + os.sep for path in {os.path.dirname(os.__file__), *site.getsitepackages()})
"""(`sysconfig` would tell the same, and load a table of how Python was built.)"""
_LIBRARY_FOLDERS = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
"""Packages are installed elsewhere too: an environment that builds on another one, a folder on PYTHONPATH, `pip --user`."""
_is_script: dict[int, tuple[bool, CodeType]] = {}
"""By identity, as in `frames`."""

FRAMEWORKS = {
    "accelerate": "accelerate",
    "composer": "composer",
    "fastai": "fastai",
    "ignite": "ignite",
    "lightning": "lightning",
    "lightning_fabric": "fabric",
    "mmengine": "mmengine",
    "monai": "monai",
    "pytorch_lightning": "lightning",
    "speechbrain": "speechbrain",
}
"""Packages whose code drives a scaler, and what their frameworks are called; "trainer" (transformers) is above Accelerate."""

_SCALE = re.compile(r"\._scale\b")

MAX_LINES = 4096
_lines: dict[tuple[int, int], Line] = {}


def is_script_code(code: CodeType) -> bool:
    """Whether this is code of the user's project: neither ours nor PyTorch's nor an installed library's."""
    known = _is_script.get(id(code))
    if known is None:
        is_script = is_user_code(code) and not is_library_file(code.co_filename)
        known = _is_script[id(code)] = (is_script, code)
    return known[0]


def is_library_file(path: str) -> bool:
    """Whether the file belongs to Python or to an installed package."""
    return path.startswith(_LIBRARY_ROOTS) or any(folder in path for folder in _LIBRARY_FOLDERS)


def framework_in(frame: FrameType | None) -> str | None:
    """The framework whose code has made the call, one of `FRAMEWORKS`; None for a script's, or a library's without words."""
    while frame is not None and not is_user_code(frame.f_code):
        frame = frame.f_back
    if frame is None or is_script_code(frame.f_code):
        return None
    found = FRAMEWORKS.get(_package(frame))
    if found == "accelerate" and module_around(frame, ("transformers.trainer",)) is not None:
        return "trainer"
    return "fabric" if found == "lightning" and ".fabric." in f"{frame.f_globals.get('__name__')}." else found


def _package(frame: FrameType | None) -> str:
    """The top-level package that a frame's code belongs to."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] if frame is not None else ""


def module_around(frame: FrameType | None, modules: Collection[str]) -> str | None:
    """The first of these modules and packages whose code is running, from `frame` on outwards."""
    while frame is not None:
        name = f"{frame.f_globals.get('__name__', '')}."
        found = next((module for module in modules if name.startswith(f"{module}.")), None)
        if found is not None:
            return found
        frame = frame.f_back
    return None


def script_line(frame: FrameType | None) -> Line | None:
    """The innermost line of the user's project from `frame` on outwards; where there is none, of an installed library.

    Remembered by code and instruction: a training loop makes the same calls from the same places all the time.
    """
    start = frame
    while frame is not None:
        code = frame.f_code
        line = _lines.get((id(code), frame.f_lasti))
        if line is not None:
            return line
        judged = _is_script.get(id(code))
        if judged[0] if judged is not None else is_script_code(code):
            line = Line(code, frame.f_lineno)
            if len(_lines) < MAX_LINES:
                _lines[id(code), frame.f_lasti] = line
            return line
        frame = frame.f_back
    return _library_line(start)


def names_scale(frame: FrameType | None) -> bool:
    """Whether a file of the user's project, from `frame` on outwards, reads the scale where a scaler keeps it."""
    files = set()
    while frame is not None:
        if is_script_code(frame.f_code):
            files.add(frame.f_code.co_filename)
        frame = frame.f_back
    return any(_SCALE.search(line) for file in files for line in linecache.getlines(file))


def _library_line(frame: FrameType | None) -> Line | None:
    while frame is not None:
        if is_user_code(frame.f_code):
            return Line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None
