"""When is a run worth being kept step by step? Where its loss or its learning rate leaves the range that it had.

An alarm is no finding: it costs a copy of the weights, tells nobody, and most pass. It looks at numbers that are there
anyway, a few comparisons a step.
"""

from __future__ import annotations

import math
from collections import deque

from ampguard.diagnose.words import number

WINDOW = 64
"""Losses of which the range is made."""
RECENT = 16
"""The newest losses, which are left out of it: a slow rise must not take its own range along."""
REFRESHED_EVERY = 8
RISEN = 2.0
RISEN_EARLY = 4.0
"""With fewer losses than `SETTLED`: a first step or two may well make it worse."""
SETTLED = 8
RATE_RAISED = 3.0


class Alarm:
    """The range of one optimizer's losses, and the largest learning rate that it bore."""

    def __init__(self) -> None:
        self.limit = math.inf
        """A |loss| beyond it raises the alarm."""
        self.highest = 0.0
        """The largest |loss| of the range."""
        self.rate = 0.0
        self._losses: deque[float] = deque(maxlen=WINDOW + RECENT)
        self._count = 0

    def is_quiet(self, loss: float | None, rate: float) -> bool:
        """Whether both are within what was borne so far. A loss that is not finite is a failure, and no alarm."""
        is_within = loss is None or -self.limit <= loss <= self.limit or not math.isfinite(loss)
        return is_within and not 0 < RATE_RAISED * self.rate < rate

    def reason(self, loss: float | None, rate: float) -> str:
        """What raised the alarm, in words."""
        if 0 < RATE_RAISED * self.rate < rate:
            return f"the learning rate went from at most {number(self.rate)} to {number(rate)}"
        verb = "fell" if loss is not None and loss < 0 else "rose"
        return f"the loss {verb} to {number(loss)}; its size had been {number(self.highest)} at most"

    def calm(self, loss: float | None, rate: float) -> None:
        """A step that was quiet: it belongs to the range."""
        self.rate = max(self.rate, rate)
        if loss is None or not math.isfinite(loss):
            return
        self._losses.append(abs(loss))
        self._count += 1
        if self._count <= SETTLED or self._count % REFRESHED_EVERY == 0:
            self._refresh()

    def settle(self) -> None:
        """What was beyond the range has become the usual: begin anew."""
        self._losses.clear()
        self._count = 0
        self.limit, self.highest, self.rate = math.inf, 0.0, 0.0

    def _refresh(self) -> None:
        losses = list(self._losses)
        older = losses[:-RECENT] if len(losses) > 2 * RECENT else losses[: max(SETTLED, len(losses) - RECENT)]
        self.highest = max(older)
        self.limit = (RISEN if self._count >= SETTLED else RISEN_EARLY) * self.highest
        if not self.highest:  # a loss of exactly 0 so far says nothing about what is much
            self.limit = math.inf
