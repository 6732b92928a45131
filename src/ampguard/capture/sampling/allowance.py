"""How much of the training's time looking may take: measured, and never more than a share of it."""

from __future__ import annotations

import time

MILESTONES = frozenset(1 << n for n in range(6, 21))
"""And these, as long as a look costs little beside all the steps before."""

EARLY = frozenset({8, 16, 32}) | MILESTONES
"""And these, where it costs little by itself."""

FIRST_ESTIMATE = 0.005
"""Seconds that a look is taken for before one has been measured."""

MILESTONE_SHARE = 0.01
MOST_SKIPPED = 32
ATTENTIVE_LOOKS = 512
"""Attentive looks are spread as far as if so many were taken in the whole run: a trend must be seen over a stretch."""

FREE_SECONDS = 0.1
"""What attention may take of a run beside its share of the time: a short run is over before much has been earned."""

FREE_LOOKS = 24
"""The same spread, of looks that are paid with that."""


class Allowance:
    """Says when a look is due. `share`: of the time since the first question. Costs some 0.2 us a step.

    `first_steps` are always looked at, so that a short run is seen as well. `cheap`: seconds that are little by themselves.
    """

    def __init__(self, share: float, first_steps: frozenset[int], cheap: float = 0.0) -> None:
        self.share = share
        self._cheap = cheap
        self._first_steps = first_steps
        self.spent = 0.0
        """Seconds of looks so far, those of attentive stretches left out."""
        self.estimate = FIRST_ESTIMATE
        """Seconds that a look takes."""
        self._is_measured = False
        self._pays = "share"
        self._last_step = 0
        self._began: float | None = None
        self._first_step = 0
        self.not_before = 0
        """The first step at which it need be asked again."""
        self._extra_share = 0.0
        self._extra_since = 0.0
        self._extra_spent = 0.0
        self._free = FREE_SECONDS

    def is_due(self, step: int) -> bool:
        """Whether a look at this step can be paid for."""
        if step < self.not_before:
            return False
        now = time.perf_counter()
        if self._began is None:
            self._began, self._first_step = now, step
        if step in self._first_steps:
            self._pays = "share"
            self._last_step = step
            return True
        elapsed = now - self._began
        estimate = self.estimate
        is_milestone = step in MILESTONES and estimate <= MILESTONE_SHARE * elapsed
        if is_milestone or (step in EARLY and estimate <= self._cheap) or self.spent + estimate <= self.share * elapsed:
            self._pays = "share"
            self._last_step = step
            return True
        if not self._extra_share:
            self.not_before = step + self._steps_until_paid(step, elapsed)
            return False
        waited = step - self._last_step
        if waited < step // ATTENTIVE_LOOKS:
            return False
        if self._extra_spent + estimate <= self._extra_share * (now - self._extra_since):
            self._pays = "attention"
        elif waited >= step // FREE_LOOKS and estimate <= self._free:
            self._pays = "free"
        else:
            return False
        self._last_step = step
        return True

    def _steps_until_paid(self, step: int, elapsed: float) -> int:
        """Steps in which it need not be asked again: half of those that it should take, and never past a milestone."""
        missing = (self.spent + self.estimate) / self.share - elapsed
        steps = int(missing / elapsed * (step - self._first_step) / 2) if elapsed > 0 else 0
        return max(1, min(steps, MOST_SKIPPED, (1 << step.bit_length()) - step))

    def spend(self, seconds: float) -> None:
        """A look has been taken and took this long."""
        self.estimate = min(seconds, 2 * self.estimate) if self._is_measured else seconds  # a hiccup is no estimate
        self._is_measured = True
        if self._pays == "share":
            self.spent += seconds
        elif self._pays == "attention":
            self._extra_spent += seconds
        else:
            self._free -= seconds

    def attend(self, share: float) -> None:
        """Something is going on: look more often from now on, for `share` of the time (0: no longer)."""
        if share and not self._extra_share:
            self._extra_since = time.perf_counter()
            self.not_before = 0
            self._extra_spent = 0.0
        self._extra_share = share
