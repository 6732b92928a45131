"""Data that was made outside PyTorch: the NumPy array or the list that a tensor was made from, and where the script made it.

`torch.from_numpy` leaves no trace of where its numbers come from. But the array is still a variable of the script when the
failure is explained, with the tensor's memory or its values.
"""

from __future__ import annotations

import dis
import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.frames import frames_up, is_user_code, locals_of
from ampguard.capture.record import Line
from ampguard.incident import Location

MAX_FRAMES = 64
MAX_NUMBERS = 1 << 20


@dataclass(frozen=True, slots=True)
class Outside:
    """What the script calls it, and the line at which that name was given its value, where it is known."""

    name: str
    kind: str
    made_at: Location | None

    def as_dict(self) -> dict[str, Any]:
        line = self.made_at
        where = {"file": line.file, "line": line.line, "code": line.code} if line is not None else {}
        return {"name": self.name, "kind": self.kind, **where}


def made_outside(held: Tensor, values: Tensor) -> Outside | None:
    """Where the numbers of a tensor come from. `held` is the script's own object, `values` what it held at the time."""
    if not (held.device.type == "cpu" and compat.is_dense(values) and values.is_floating_point()):
        return None
    if not 0 < values.numel() <= MAX_NUMBERS or not compat.has_values(values):
        return None
    numbers = values.detach().reshape(-1).double()
    for frame in frames_up(sys._getframe(1), MAX_FRAMES):
        if not is_user_code(frame.f_code):
            continue
        names = locals_of(frame)
        of_self = getattr(names.get("self"), "__dict__", {})
        for prefix, found in (("", names), ("self.", of_self)):
            for name, value in tuple(found.items()):
                kind = _kind_of(value, held, numbers)
                if kind is not None:
                    line = None if prefix else _given_at(frame, name)
                    return Outside(f"{prefix}{name}", kind, line.location() if line is not None else None)
    return None


def _kind_of(value: object, held: Tensor, numbers: Tensor) -> str | None:
    """What it is, if these numbers are its own: the same memory, or the same values with the same gaps."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray:
        array: Any = value
        if array.dtype.kind != "f" or array.size != numbers.numel():
            return None
        if array.ctypes.data == held.data_ptr() or _are_same(
            torch.from_numpy(array.astype("float64").reshape(-1)), numbers
        ):
            return "NumPy array"
    elif type(value) is list and len(value) == numbers.numel() and all(isinstance(x, float) for x in value):
        return "list" if _are_same(torch.tensor(value, dtype=torch.float64), numbers) else None
    return None


def _are_same(one: Tensor, other: Tensor) -> bool:
    """In float32, which the tensor may have been rounded to; NaN equals NaN."""
    return torch.equal(torch.nan_to_num(one.float(), math.pi), torch.nan_to_num(other.float(), math.pi))


def _given_at(frame: FrameType, name: str) -> Line | None:
    """Where the name was last given a value: the nearest line before the running one, else (in a loop) the last."""
    lines = _stores(frame.f_code).get(name, ())
    before = [number for number in lines if number <= frame.f_lineno]
    number = max(before or lines, default=None)
    return Line(frame.f_code, number) if number is not None else None


@functools.lru_cache(maxsize=64)
def _stores(code: CodeType) -> dict[str, tuple[int, ...]]:
    """The lines at which a piece of code gives its names values.

    >>> _stores(compile("a = 1\\nb = 2\\na += b", "", "exec"))
    {'a': (1, 3), 'b': (2,)}
    """
    found: dict[str, list[int]] = {}
    at = dict(_line_starts(code))
    number = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        number = at.get(instruction.offset, number)
        if instruction.opname.startswith("STORE_"):
            names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            for name in names:
                found.setdefault(str(name), []).append(number)
    return {name: tuple(lines) for name, lines in found.items()}


def _line_starts(code: CodeType) -> Iterator[tuple[int, int]]:
    return ((offset, number) for offset, number in dis.findlinestarts(code) if number is not None)
