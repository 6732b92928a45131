"""How long an investigation may take: the training waits for it."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from pathlib import Path

from ampguard import compat

LEAST_SECONDS, LEAST_SECONDS_OF_HEALING = 2.5, 25.0
"""What an investigation of the quickest step may take: for a card, and where its fixes are waited for."""

STEPS_WORTH = 22.0
"""And what it may take of any step: so many times its duration."""

MOST_CROWDING = 4.0
SCHEDULER = Path("/proc/thread-self/schedstat")
"""Nanoseconds that this thread has run, and that it was ready and had to wait (Linux)."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How long an investigation may take.

    A card may take 30 times the failing step, and at least 3 seconds; what is begun within this budget ends by then. Where
    the run waits for a fix that it goes on with, it may take half a minute: on a busy machine too, a fix is tried.
    """

    deadline: float

    @staticmethod
    def for_step(step_seconds: float, started: float, least: float = LEAST_SECONDS) -> Budget:
        """The budget of an investigation that began at `started` (`time.perf_counter()`): at least `least` seconds.

        These are seconds of a machine that is not crowded. Other ranks wait meanwhile, in a collective that gives up: at most
        a fifth of that time is used.
        """
        seconds = max(least * crowding(), STEPS_WORTH * step_seconds)
        patience = compat.collective_timeout()
        return Budget(started + (seconds if patience is None else min(seconds, patience / 5)))

    @property
    def is_spent(self) -> bool:
        return time.perf_counter() > self.deadline


UNLIMITED = Budget(math.inf)


def crowding() -> float:
    """How many times longer everything takes here because others use the processors too; 1 where that is not known."""
    with contextlib.suppress(OSError, ValueError):
        ran, waited, *_ = map(int, SCHEDULER.read_text().split())
        return min(MOST_CROWDING, 1 + waited / max(ran, 1))
    return 1.0
