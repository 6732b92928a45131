"""Attributes that are replaced while the guard is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampguard.capture.seen_through import let_warnings_through


class Patches:
    """Replaced attributes, and what stood there."""

    def __init__(self) -> None:
        let_warnings_through()
        self._done: list[tuple[Any, str, Any, Any, bool]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(original)` in place of `owner.name`."""
        is_own = name in vars(owner)
        original = vars(owner)[name] if is_own else getattr(owner, name)
        replacement = make(original)
        setattr(owner, name, replacement)
        self._done.append((owner, name, original, replacement, is_own))

    def undo(self) -> None:
        for owner, name, original, replacement, is_own in reversed(self._done):
            if vars(owner).get(name) is not replacement:
                continue
            if is_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)  # it is that of a base class
        self._done.clear()
