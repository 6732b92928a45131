"""Several threads that train at once: one of them is followed, and the others are passed over.

A record holds one thread's steps. To begin it anew at each backward pass of whichever thread comes would leave no
thread's step in it, so the one that is followed stays so while it goes on training.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from ampguard import compat

PASSES_ALONE = 8
"""Backward passes of one thread, with none of the followed one in between, after which it is followed instead."""


class OtherThreads:
    """Counts whose backward passes come between whose. A thread is followed as soon as it makes its first."""

    def __init__(self) -> None:
        self.are_training = False
        """Whether, when another thread than the followed one last made a backward pass, both were at it."""
        self._trains = False
        """Whether the followed thread has made a backward pass since it has been."""
        self._passes = 0
        self._seen: dict[int, int] = {}
        """By thread: how many passes had been followed when it last made one of its own."""
        self._alone: dict[int, int] = {}

    def followed(self) -> None:
        """The followed thread makes a backward pass."""
        self._passes += 1
        self._trains = True

    def begin(self, before: int) -> None:
        """This thread is followed now, instead of thread `before`."""
        self._seen[before], self._alone[before] = self._passes, 0
        self._trains = self.are_training = False

    def takes_over(self, followed: int, losses: Any) -> bool:
        """Whether this thread, which begins a backward pass of `losses`, is followed instead of thread `followed`.

        So it is, too, where its loss is bad: what it did before is not known, but what it does next will be.
        """
        me = threading.get_ident()
        seen, self._seen[me] = self._seen.get(me), self._passes
        is_alone = seen == self._passes
        self._alone[me] = self._alone.get(me, 0) + 1 if is_alone else 0
        is_free = not self._trains or seen is None or self._alone[me] >= PASSES_ALONE or not is_alive(followed)
        self.are_training = not is_free
        return is_free or _is_bad(losses)


def is_alive(thread: int) -> bool:
    """Whether a thread of this identity is there still."""
    return any(one.ident == thread for one in threading.enumerate())


def _is_bad(losses: Any) -> bool:
    """Whether one of these numbers is not finite. Asked of the CPU's alone: another device would be waited for."""
    for loss in losses if isinstance(losses, (tuple, list)) else (losses,):
        if isinstance(loss, Tensor) and loss.is_cpu and loss.numel() == 1 and compat.has_values(loss):
            value = loss.item()
            if isinstance(value, float) and value - value != 0.0:
                return True
    return False
