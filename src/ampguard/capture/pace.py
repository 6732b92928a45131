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

STRETCH_SECONDS = 0.1
"""What must have been saved up before calls are kept again: values are followed over whole stretches of calls."""

TAPED_OP_SECONDS = 1.2e-5
"""What keeping an operator between two calls takes."""


class Pace:
    """Adds up what keeping calls without gradients has taken, in this thread's own time: others may use the processors."""

    def __init__(self) -> None:
        self.is_resting = False
        self.may_rest = True
        """False where results lie on a device, which looking at them would have to wait for."""
        self.spent = 0.0
        self._began = math.inf
        self._entered = 0.0
        self._kept = 0
        self.is_open = False
        """Whether what is kept now follows such a call, and no gradients have been asked for since."""

    def enter(self, kept: int) -> None:
        """A call is about to be kept, beside so many events."""
        self._entered = time.thread_time()
        if self._began == math.inf:
            self._began = time.perf_counter()
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
        self.is_resting = self.may_rest and self.spent > FREE_SECONDS + SHARE * (time.perf_counter() - self._began)

    def rests(self) -> bool:
        """Whether the next call is only looked at."""
        elapsed = time.perf_counter() - self._began
        self.is_resting = self.spent + STRETCH_SECONDS > FREE_SECONDS + SHARE * elapsed
        return self.is_resting
