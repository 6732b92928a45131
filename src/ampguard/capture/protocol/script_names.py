"""What a script's frames call a tensor, and which of their names hold the loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import Tensor

from ampguard.capture.frames import locals_of
from ampguard.capture.protocol.script_lines import is_script_code
from ampguard.capture.protocol.script_units import Spot

MAX_SPOTS = 8
MAX_ATTRIBUTES = 64


def script_frames(frame: FrameType | None, in_a_row: bool = False) -> Iterator[FrameType]:
    """Those of the script among a frame and its callers, the innermost first. `in_a_row`: up to who was called by others."""
    count = 0
    while frame is not None and count < MAX_SPOTS:
        if is_script_code(frame.f_code):
            count += 1
            yield frame
        elif in_a_row and count:
            return
        frame = frame.f_back


def spots_of(frame: FrameType, scale: float, in_a_row: bool = False) -> Iterator[Spot]:
    """Where each of them stands."""
    for inner in script_frames(frame, in_a_row):
        yield Spot(inner.f_code, inner.f_lineno, scales_in(inner, scale), inner.f_lasti)


def scales_in(frame: FrameType, scale: float) -> dict[str, float]:
    """Names whose value is the present loss scale, or its inverse (as a float: an int of that size is a size)."""
    found = {}
    for name, value in locals_of(frame).items():
        for path, number in _numbers_in(name, value):
            if number in (scale, 1.0 / scale):
                found[path] = 1.0 if number == scale else -1.0
    return found


def _numbers_in(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """A number, those that are attributes of an object, and those in a dictionary, as the script's source names them."""
    if type(value) is float:
        yield name, value
    elif type(value) is dict and len(value) <= MAX_ATTRIBUTES:
        yield from ((f"{name}[{key!r}]", inner) for key, inner in list(value.items()) if type(inner) is float)
    else:
        held = getattr(value, "__dict__", None)
        if type(held) is dict and len(held) <= MAX_ATTRIBUTES:
            yield from ((f"{name}.{key}", inner) for key, inner in list(held.items()) if type(inner) is float)


def name_in(tensor: Tensor, frame: FrameType) -> str | None:
    """What a frame calls a tensor: a variable, an item of a dictionary, a list it was put in last, an attribute of `self`."""
    for name, value in locals_of(frame).items():
        if value is tensor:
            return name
        if type(value) is dict and len(value) <= MAX_SPOTS:
            key = next((key for key, held in value.items() if held is tensor and type(key) is str), None)
            if key is not None:
                return f"{name}[{key!r}]"
        if type(value) is list and value and value[-1] is tensor and "get_scale" not in frame.f_code.co_names:
            return name  # kept for later, all of one kind
    owner = locals_of(frame).get("self")
    attributes = getattr(owner, "__dict__", None) or {}
    return next((f"self.{name}" for name, value in list(attributes.items()) if value is tensor), None)
