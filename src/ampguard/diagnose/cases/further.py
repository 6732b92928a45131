"""Failures that look like one that was told: how much of a run's time may be spent on seeing that they are.

To know a failure by where it begins, its step has to be run again. In a run that goes on failing that would be done for
every step, and for every batch of an evaluation. So looks that find nothing new have an allowance: the time of one
investigation, and then a share of the run's. What is not looked at is counted to what its like was found to be.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ampguard.capture.record import BadResult, RootCall
from ampguard.diagnose.budget import Budget
from ampguard.diagnose.cases.case import Case

TIME_SHARE = 0.05

Likeness = tuple[str, str, int | None]
"""What is seen of a failure without running it again: its mode, its kind, and the last model that was called."""


@dataclass
class _Look:
    bad: BadResult
    started: float
    is_new: bool = False


class FurtherFailures:
    """Which failures are counted without a look."""

    def __init__(self) -> None:
        self._known: dict[Likeness, Case] = {}
        self._look: _Look | None = None
        self._started = time.perf_counter()
        self._spent = 0.0

    def case_of(
        self, bad: BadResult, story: Callable[[], Case | None], step_seconds: float, least: float
    ) -> Case | None:
        """The case that this failure is counted to without a look; None where it is worth one.

        `story`: a divergence that was told and goes on. Weights that are thrown away fail wherever they are used: as many
        looks as for others are not needed to know it.
        """
        if bad.has_ended_run or not self._spent:
            return None
        now = time.perf_counter()
        if self._spent <= TIME_SHARE * (now - self._started):
            return None
        known = self._known.get(likeness(bad))
        goes_on = story()
        if goes_on is not None:
            is_seen_in_mode = any(mode == bad.mode for mode, *_ in self._known)
            return goes_on if is_seen_in_mode and self._spent > least else None
        return known if self._spent > Budget.for_step(step_seconds, 0.0, least).deadline else None

    def begin(self, bad: BadResult) -> None:
        """A failure is looked at."""
        self._look = _Look(bad, time.perf_counter())

    def led_to(self, bad: BadResult, case: Case, is_new: bool = False) -> None:
        """What a failure was found to be."""
        self._known[likeness(bad)] = case.told_as
        if self._look is not None and self._look.bad is bad:
            self._look.is_new = is_new

    def end(self) -> None:
        """The look is over."""
        look, self._look = self._look, None
        if look is not None and not look.is_new:
            self._spent += time.perf_counter() - look.started


def likeness(bad: BadResult) -> Likeness:
    """What is seen of a failure at once."""
    roots = [event for event in bad.record.events if isinstance(event, RootCall)]
    return bad.mode, bad.kind, id(roots[-1].module) if roots else None
