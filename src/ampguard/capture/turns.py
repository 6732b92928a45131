"""Several threads that train at once: one of them is followed, and the others are passed over.

A record holds one thread's steps. To begin it anew at each backward pass of whichever thread comes would leave no
thread's step in it, so the one that is followed stays so while it goes on training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ampguard import compat
from ampguard.capture.barrier import FaultBarrier

PASSES_ALONE = 8
"""Backward passes of one thread, with none of the followed one in between, after which it is followed instead."""


class Turns:
    """Which thread is followed, and whether it is in the middle of something."""

    def __init__(self, begin_anew: Callable[[int], None]) -> None:
        self.thread = threading.get_ident()
        """The one that is followed, by its identity."""
        self.lock = threading.RLock()
        """Held by the thread in whose root call or backward pass we are. Nobody waits for it: others are passed over."""
        self.has_begun = False
        """Whether a module was called, or anything differentiated, since the guard began."""
        self._passes = 0
        """Backward passes that were followed."""
        self._trains = False
        """Whether the followed thread has made one since it has been."""
        self.are_several = False
        """Whether another thread trains beside the followed one."""
        self._others = OtherThreads()
        self._begin_anew = begin_anew
        """Told of the thread that is followed now, instead of another."""

    def take(self) -> bool:
        """Whether this thread is followed and no other one is in the middle of something that is; it holds `lock` then."""
        if not self.lock.acquire(blocking=False):
            return False
        if self.thread != threading.get_ident():
            self.lock.release()
            return False
        return True

    def differentiates(self) -> None:
        """The followed thread makes a backward pass."""
        self.has_begun = self._trains = True
        self._passes += 1

    def follows(self, losses: Any) -> bool:
        """Whether a backward pass is followed that begins in another thread: training is where backward is called."""
        self.are_several = self._trains and is_alive(self.thread)
        return self._others.takes_over(self._passes, self.are_several, losses) and self._follow()

    def is_anothers(self) -> bool:
        """Whether this thread is not the one that is followed, and that one trains."""
        return threading.get_ident() != self.thread and self._trains and is_alive(self.thread)

    def passes_over(self) -> bool:
        """Whether an optimizer that is about to step, or has, is that of a thread that trains beside the followed one.

        Asked where there `are_several`.
        """
        return self.are_several and threading.get_ident() != self.thread and not compat.in_backward()

    def takes_over(self) -> bool:
        """Whether this thread, which is about to call a module, is followed from now on: nobody is to be followed any
        more (a server answers in a thread of its own), or this is the main thread and no other one trains."""
        is_in_use = self.has_begun and is_alive(self.thread)
        if is_in_use and (self._passes or threading.current_thread() is not threading.main_thread()):
            return False
        self.are_several = False
        return self._follow()

    def _follow(self) -> bool:
        """Begin anew with this thread. False where the one that was followed is in the middle of something."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            before, self.thread = self.thread, threading.get_ident()
            self._others.begin(before, self._passes)
            self._trains = False
            self._begin_anew(self.thread)
        finally:
            self.lock.release()
        return True


class OtherThreads:
    """Counts whose backward passes come between whose. A thread is followed as soon as it makes its first."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        """By thread: how many passes had been followed when it last made one of its own."""
        self._alone: dict[int, int] = {}

    def begin(self, before: int, passes: int) -> None:
        """This thread is followed now, instead of thread `before`, after so many passes that were followed."""
        self._seen[before], self._alone[before] = passes, 0

    def takes_over(self, passes: int, is_training: bool, losses: Any) -> bool:
        """Whether this thread, which begins a backward pass of `losses`, is followed instead of another.

        `passes`: those that were followed so far; `is_training`: whether the other one is still at it. So it is, too,
        where its loss is bad: what it did before is not known, but what it does next will be.
        """
        me = threading.get_ident()
        seen, self._seen[me] = self._seen.get(me), passes
        is_alone = seen == passes
        self._alone[me] = self._alone.get(me, 0) + 1 if is_alone else 0
        is_free = not is_training or seen is None or self._alone[me] >= PASSES_ALONE
        return is_free or _is_bad(losses)


class OnStack(Protocol):
    """A tape, as far as it is known here."""

    @property
    def is_on_stack(self) -> bool: ...
    def leave(self) -> None: ...


class TapesLeftBehind:
    """Tapes that are on the stack of a thread that is not followed any more. Each is taken off when its thread comes by."""

    def __init__(self, barrier: FaultBarrier) -> None:
        self._barrier = barrier
        self._tapes: list[OnStack] = []

    def add(self, tape: OnStack) -> None:
        """Its thread is not followed any more."""
        if tape.is_on_stack:
            self._tapes.append(tape)
            self._barrier.own_modes, self._barrier.calls = 0, None
            self._barrier.before_hiding = self.leave

    def leave(self) -> None:
        """Take off those of this thread."""
        for tape in self._tapes:
            tape.leave()
        self._tapes = [tape for tape in self._tapes if tape.is_on_stack]
        self._barrier.before_hiding = self.leave if self._tapes else None


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
