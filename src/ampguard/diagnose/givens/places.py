"""Where the running script holds a tensor, and how it writes that: `x`, `batch["frame"]["rgb"]`, `b.targets[0]`."""

from __future__ import annotations

import sys
import weakref
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


Part = tuple[str, Any]
"""How the script writes something, and the thing."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the script holds a tensor: how it writes it, what it lies in, from a variable on, and its frame's variables."""

    written: str
    path: list[Part]
    variables: dict[str, Any]

    @property
    def holder(self) -> Any:
        """What it lies in; None where it is a variable itself."""
        return self.path[-1][1] if self.path else None

    @property
    def holder_written(self) -> str | None:
        return self.path[-1][0] if self.path else None


def place_of(tensor: Tensor) -> Place | None:
    """Where the running script holds a tensor; None where no variable leads to it."""
    return next(places_of(tensor), None)


def places_of(tensor: Tensor) -> Iterator[Place]:
    """All such places: the innermost frame's first, of these what lies the least deep."""
    for frame in frames_here(sys._getframe(1), MAX_FRAMES):
        if is_script_code(frame.f_code):
            variables = {n: v for n, v in locals_of(frame).items() if n.isidentifier() and not n.startswith("__")}
            for depth in range(MAX_DEPTH + 1):
                for name, value in variables.items():
                    for path, written in paths_to(tensor, name, value, depth):
                        yield Place(written, path, variables)


def parts_of(name: str, value: Any) -> list[Part]:
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


def paths_to(tensor: Tensor, name: str, value: Any, depth: int) -> Iterator[tuple[list[Part], str]]:
    """The ways to a tensor that lies so deep in a value: all that it lies in, and how it is written itself."""
    value = value() if isinstance(value, weakref.ref) else value
    if depth == 0:
        if isinstance(value, Tensor) and (value is tensor or is_same_memory(value, tensor)):
            yield [], name
        return
    for written, item in parts_of(name, value):
        for path, found in paths_to(tensor, written, item, depth - 1):
            yield [(name, value), *path], found


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and compat.storage_key(one) == compat.storage_key(other) != 0
