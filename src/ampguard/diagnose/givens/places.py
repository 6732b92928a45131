"""Where the running script holds a tensor, and how it writes that: `x`, `batch["frame"]["rgb"]`, `b.targets[0]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.frames import frames_here, locals_of
from ampguard.capture.protocol.script_lines import is_script_code
from ampguard.capture.protocol.script_objects import attributes_of

MAX_FRAMES = 60
MAX_ITEMS = 64
MAX_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where the script holds a tensor: how it writes it, what it lies in and how it writes that, and its frame's variables."""

    written: str
    holder: Any
    holder_written: str | None
    variables: dict[str, Any]


def place_of(tensor: Tensor) -> Place | None:
    """Where the running script holds a tensor; None where no variable leads to it."""
    for frame in frames_here(sys._getframe(1), MAX_FRAMES):
        if is_script_code(frame.f_code):
            variables = {n: v for n, v in locals_of(frame).items() if n.isidentifier() and not n.startswith("__")}
            for depth in range(MAX_DEPTH + 1):
                for name, value in variables.items():
                    for written, holder, holder_written in _inside(name, value, tensor, depth):
                        return Place(written, holder, holder_written, variables)
    return None


def parts_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """The items or the attributes of what may hold a batch, each as it is written."""
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", item) for key, item in list(value.items())[:MAX_ITEMS]]
    if isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", None)
        names = [f"{name}.{f}" for f in fields] if fields else [f"{name}[{i}]" for i in range(len(value))]
        return list(zip(names, value, strict=False))[:MAX_ITEMS]
    attributes = attributes_of(value)
    if not isinstance(attributes, dict) or isinstance(value, (type, nn.Module, Tensor)) or len(attributes) > MAX_ITEMS:
        return []
    return [(f"{name}.{key}", item) for key, item in list(attributes.items()) if not key.startswith("_")]


def _inside(name: str, value: Any, tensor: Tensor, depth: int) -> Iterator[tuple[str, Any, str | None]]:
    """The places of a tensor that lie so deep in a value, each with what it lies in."""
    if depth == 0:
        if isinstance(value, Tensor) and (value is tensor or _is_same_memory(value, tensor)):
            yield name, None, None
        return
    for written, item in parts_of(name, value):
        for found, holder, holder_written in _inside(written, item, tensor, depth - 1):
            yield (found, value, name) if holder is None else (found, holder, holder_written)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and compat.storage_key(one) == compat.storage_key(other) != 0
