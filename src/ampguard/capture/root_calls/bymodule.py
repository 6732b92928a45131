"""What is known of each module, without keeping it alive: asked in every step, so it is found by identity."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from torch import nn

T = TypeVar("T")


class ByModule(Generic[T]):
    """A table with modules as keys; an entry goes when its module does."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[nn.Module], T]] = {}

    def get(self, module: nn.Module) -> T | None:
        entry = self._entries.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def put(self, module: nn.Module, value: T) -> T:
        key = id(module)
        self._entries[key] = (weakref.ref(module, lambda _: self._entries.pop(key, None)), value)
        return value
