"""Counting iterations.

An iteration is one attempted step of every optimizer in use: with several it ends when the last of them has stepped,
and a step that the scaler skips counts. An accumulation window is one iteration.
"""

from __future__ import annotations

import weakref

from torch.optim import Optimizer

LONGEST_TURN = 8
"""Steps of one optimizer to one of another, in one iteration (a critic's); one that joins later than that joins late."""


class StepCounter:
    """Counts the iterations that have ended."""

    def __init__(self) -> None:
        self.count = 0
        self._created: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._ever: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._idle: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._provisional = 0
        self._by_backward = 0
        self._only: weakref.ref[Optimizer] | None = None

    @property
    def counts_backwards(self) -> bool:
        """Whether a backward pass stands for a step: no optimizer is known."""
        return not (self._ever or self._created)

    def differentiated(self) -> bool:
        """A backward pass ended. True where it stands for the step: no optimizer is known."""
        if not self.counts_backwards:
            return False
        self.count += 1
        self._by_backward += 1
        return True

    def created(self, optimizer: Optimizer) -> None:
        """An optimizer exists and may be expected to step."""
        self._created.add(optimizer)
        self._only = None

    def attempted(self, optimizer: Optimizer) -> bool:
        """An optimizer's step was attempted. True where that ends an iteration."""
        if self._by_backward:  # an optimizer from before the guard: its steps were counted by their backward passes
            self.count -= self._by_backward
            self._by_backward = 0
        if self._only is not None and self._only() is optimizer:  # the common loop, without set operations
            self.count += 1
            return True
        if optimizer in self._idle:  # it steps after all: a few steps without it were one longer iteration
            self._idle.discard(optimizer)
            if self._provisional <= LONGEST_TURN:
                self.count -= self._provisional
            self._provisional = 0
        repeated = optimizer in self._stepped
        self._ever.add(optimizer)
        self._stepped.add(optimizer)
        waiting = [o for o in self._created if o not in self._stepped and o not in self._idle]
        if waiting and repeated and all(o not in self._ever for o in waiting):
            self._idle.update(waiting)  # made but never used
            self.count += 1
            self._provisional += 1
            waiting = []
        if waiting:
            return False
        self.count += 1
        if self._idle and any(o not in self._ever for o in self._idle):
            self._provisional += 1
        self._stepped.clear()
        if len(self._created | self._ever) == 1:
            self._only = weakref.ref(optimizer)
        return True
