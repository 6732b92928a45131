"""What a script computes before it trains from a value that is not finite, and is finite again: 1 / Inf is 0.

Nobody looks at such a tensor for its own sake. It is known by the bad value behind it, for the step in which it fails.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from ampguard.capture.record import Ref
from ampguard.compat import storage_key

MAX_KNOWN = 256
"""Calls that are kept although what they give is finite, for what they were given."""


class Vanished:
    """Finite tensors, by the calls that made them, and the bad value that each was computed from."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Tensor], Ref, Ref]] = []

    @property
    def is_full(self) -> bool:
        return len(self._known) >= MAX_KNOWN

    def note(self, tensor: Tensor, ref: Ref, behind: Ref) -> None:
        self._known.append((weakref.ref(tensor), ref, behind))

    def of(self, tensor: Tensor) -> tuple[Ref, Ref] | None:
        """What the log calls a tensor (or one that its memory belongs to), and the bad value behind it."""
        memory = storage_key(tensor)
        for weak, ref, behind in reversed(self._known):
            one = weak()
            if one is not None and (one is tensor or storage_key(one) == memory != 0):
                return ref, behind
        return None
