"""Where the step's modules are called, and with what: a fix of a module's precision is written there."""

from __future__ import annotations

from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from ampguard import numerics
from ampguard.capture.frames import is_own_file, is_user_code
from ampguard.capture.record import Line
from ampguard.capture.root_calls.trees import map_tensors

MOST_PLACES = 4
"""Calls of one module that are kept."""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module. `line` is None where PyTorch's own code made it (`nn.Sequential`).

    `low` and `low_named`: which of its arguments, by position and by name (of `named`), are tensors in low precision; `others`
    whether any argument by position is no floating tensor; `nests` whether there are tensors within lists, tuples or dicts.
    """

    line: Line | None
    low: tuple[bool, ...]
    named: tuple[str, ...]
    low_named: tuple[str, ...]
    others: bool
    nests: bool

    @property
    def has_low(self) -> bool:
        return any(self.low) or bool(self.low_named)


def arguments_of(line: Line | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleCall:
    """A call at a line, by what it was given."""
    return ModuleCall(
        line,
        tuple(_is_low(a) for a in args),
        tuple(kwargs),
        tuple(name for name, value in kwargs.items() if _is_low(value)),
        any(not (isinstance(a, Tensor) and a.is_floating_point()) for a in args),
        any(_holds_tensors(value) for value in (*args, *kwargs.values())),
    )


def note_call(
    calls: dict[int, list[ModuleCall]],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    frame: FrameType | None,
    stop: CodeType | None,
    of_root: Line | None,
) -> None:
    """Note a call that was made from `frame`, the innermost one.

    Frames from that of `stop` on are not the step's: the call was that of a root, which the script made at `of_root`.
    """
    while frame is not None and frame.f_code is not stop and is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return
    line = Line(frame.f_code, frame.f_lineno) if is_user_code(frame.f_code) else None
    if frame.f_code is stop:
        line = of_root
    known = calls.setdefault(id(module), [])
    if all(call.line != line for call in known) and len(known) < MOST_PLACES:
        known.append(arguments_of(line, args, kwargs))


def _is_low(value: Any) -> bool:
    return isinstance(value, Tensor) and numerics.is_low_precision(value.dtype)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return False
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return bool(found)
