"""Which tensors are the tangents of dual numbers: they are computed with as any others, by operators that nobody called."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ampguard.capture.record import Ref

MOST = 4096
"""Dual numbers that are remembered."""


@dataclass(frozen=True, slots=True)
class Mark:
    """From the event `at` on, a tensor is a tangent (`is_made`); or it was taken out of a dual number, and is none.

    `ref` is None where no event made it.
    """

    at: int
    ref: Ref | None
    tensor: weakref.ref[Tensor]
    is_made: bool


class Tangents:
    """The last dual numbers that were made and taken apart outside every module."""

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque(maxlen=MOST)

    def note(self, at: int, ref: Ref | None, tensor: Tensor, is_made: bool) -> None:
        """`tensor`, which `ref` names, is a tangent from the event `at` on, or no longer."""
        self._marks.append(Mark(at, ref, weakref.ref(tensor), is_made))

    def between(self, first: int, last: int) -> Iterator[Mark]:
        """What was noted from one event on until behind another."""
        return (mark for mark in self._marks if first <= mark.at <= last + 1)
