"""How much time keeping calls without gradients may take.

An evaluation is a few calls; an agent that acts, or a sampler, makes thousands of tiny ones between two updates, and to
keep each of them would take longer than they do. The first seconds are free, so that whatever a short script evaluates
is kept; after that calls are only looked at while more than a share of the time has gone into keeping them.
"""

from __future__ import annotations

import math
import time

FREE_SECONDS = 2.0
SHARE = 0.03

BEHIND_OP_SECONDS = 2e-5
"""What taping an operator takes behind the last call of a rollout: many of them write to rows."""

BEHIND_SHARE = 0.01
"""Of the time, what taping may take that which is computed behind the last call of a rollout, while calls rest."""

MOST_SECONDS = 10.0
"""In which every call is kept behind a failure: of an evaluation without an end, no longer."""

STRETCH_SECONDS = 0.1
"""What must have been saved up before calls are kept again: values are followed over whole stretches of calls."""

TAPED_OP_SECONDS = 2e-5
"""What keeping an operator between two calls takes."""


class Pace:
    """Adds up what keeping calls without gradients has taken, in this thread's own time: others may use the processors."""

    def __init__(self) -> None:
        self.is_resting = False
        self.may_rest = True
        """False where results lie on a device, which looking at them would have to wait for."""
        self.is_attentive = False
        self.attentive_until = 0.0
        """Whether every call is kept, and up to how many seconds behind the first."""
        self.spent = 0.0
        self._began = math.inf
        self._began_computing = 0.0
        self._entered = 0.0
        self._kept = 0
        self.is_behind = False
        """Whether it is being taped."""
        self._behind_from = 0
        self._spent_behind = 0.0
        self.backwards = 0
        self.calls = 0
        """Calls without gradients since the last backward pass, and the last time that there were any between two."""
        self.calls_before = 0
        self.is_open = False
        """Whether what is kept now follows such a call, and no gradients have been asked for since."""

    def count(self, backwards: int) -> None:
        """A call begins, after so many backward passes."""
        if self.backwards != backwards:
            self.backwards = backwards
            self.calls_before, self.calls = self.calls, 0
        self.calls += 1

    def goes_behind(self, kept: int) -> bool:
        """Whether what comes now is taped, where no other call is to be expected before the next backward pass (`calls` are as
        many as `calls_before`): it (returns, advantages, targets) is what training is given. So many events are kept by now."""
        self._behind_from = kept
        self.is_behind = self._spent_behind <= BEHIND_SHARE * self._elapsed()
        return self.is_behind

    def end_behind(self, kept: int) -> None:
        """Charge what was."""
        self.is_behind = False
        self._spent_behind += BEHIND_OP_SECONDS * (kept - self._behind_from)

    def enter(self, kept: int) -> None:
        """A call is about to be kept, beside so many events."""
        self._entered = time.thread_time()
        if self._began == math.inf:
            self._began, self._began_computing = time.perf_counter(), time.process_time()
        self.close(kept)

    def close(self, kept: int) -> None:
        """Charge what was kept since the last such call. (What a loss is made of is the training's, and not charged.)"""
        if self.is_open:
            self.is_open = False
            self.spent += TAPED_OP_SECONDS * (kept - self._kept)

    def leave(self, kept: int, seconds: float) -> None:
        """It has returned after `seconds` of the script's own (of the thread's time); so many events are kept now."""
        self._kept = kept
        self.is_open = True
        self.spent += time.thread_time() - self._entered - seconds
        elapsed = self._elapsed()
        if self.is_attentive and elapsed > self.attentive_until:
            self.is_attentive = False
        self.is_resting = self.may_rest and not self.is_attentive and self.spent > FREE_SECONDS + SHARE * elapsed

    def attend(self, is_on: bool) -> None:
        """Keep every call for a while, whatever that takes: a step failed of which not everything had been. Or no longer."""
        self.is_attentive, self.is_resting = is_on, False
        elapsed = self._elapsed() if self._began < math.inf else 0.0
        self.attentive_until = elapsed + MOST_SECONDS

    def rests(self) -> bool:
        """Whether the next call is only looked at."""
        elapsed = self._elapsed()
        is_dear = self.spent + STRETCH_SECONDS > FREE_SECONDS + SHARE * elapsed
        self.is_resting = is_dear and not self.is_attentive
        return self.is_resting

    def _elapsed(self) -> float:
        """Seconds since the first call; where others use the processors too, those that this process has had of them."""
        return min(time.perf_counter() - self._began, time.process_time() - self._began_computing)
