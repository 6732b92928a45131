"""Steps that the scaler skips: which of them are worth a look?

Most are the scaler finding its scale, and nothing is wrong. One may be a bad sample at step 41,000. So each is looked at
(one replay at a loss scale of 1) as long as looking takes next to no time of the run.
"""

from __future__ import annotations

import time

from ampguard.capture.record import BadResult
from ampguard.capture.recorder import FlightRecorder
from ampguard.diagnose.cases.case import Case
from ampguard.diagnose.gradients import is_only_the_scale
from ampguard.replay.rebuild import Replayer

FREE_LOOKS = 8
TIME_SHARE = 0.02
UNREPLAYABLE_BEFORE_ARMING = 3
MOST_COUNTED = 4096


class SkippedSteps:
    """Keeps the time spent on skipped steps small."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.last: Case | None = None
        """What the last skipped step that was looked at was skipped for."""
        self._recorder = recorder
        self._started = time.perf_counter()
        self._looks = 0
        self._looks_at_small = 0
        """At steps that were skipped at a scale of 1 or less."""
        self._spent = 0.0
        self._unreplayable = 0
        self._counted: set[int] = set()
        """The latest steps that were counted as skipped for their loss scale alone."""

    def is_known(self, bad: BadResult, cases: list[Case]) -> bool:
        """Whether the scaler skipped this step as it skipped others before: only because of the loss scale.

        It is counted then: to that case, or to what the last step that was looked at was skipped for.
        """
        if bad.loss_scale is None or not bad.is_held_off or bad.has_ended_run:
            return False
        if bad.loss_scale <= 1.0 and self._looks_at_small < FREE_LOOKS:
            self._looks_at_small += 1
            return False  # the loss was not made larger: something else overflows
        case = next((c for c in cases if c.incident.cause == "loss-scale-overflow"), None)
        if case is None or (self._may_look() and not self._is_only_the_scale(bad, case)):
            return False
        self._counted = {step for step in self._counted if step > bad.step - MOST_COUNTED} | {bad.step}
        (self.last or case).came_back(bad.step)  # what is not looked at is most likely what the last one was
        return True

    def explains(self, bad: BadResult, cases: list[Case]) -> Case | None:
        """The case of a loss that holds scaled gradients (a penalty), where this one's step was skipped like those before."""
        if (bad.kind, bad.mode) != ("loss", "train") or bad.step not in self._counted:
            return None
        alike = (c for c in cases if c.incident.cause == "loss-scale-overflow" and c.incident.severity == "info")
        return next((case for case in alike if case.kind == "loss"), None)

    def note(self, bad: BadResult, case: Case) -> None:
        """A failure was told as `case`: remember it if the step was skipped for it."""
        if bad.is_held_off:
            self.last = case

    def cannot_be_replayed(self) -> bool:
        """A skipped step cannot be run again. True once there were so many that the next ones should be watched live."""
        self._unreplayable += 1
        return self._unreplayable == UNREPLAYABLE_BEFORE_ARMING

    def _may_look(self) -> bool:
        return self._looks < FREE_LOOKS or self._spent < TIME_SHARE * (time.perf_counter() - self._started)

    def _is_only_the_scale(self, bad: BadResult, case: Case) -> bool:
        started = time.perf_counter()
        try:
            if not is_only_the_scale(bad, Replayer(bad, self._recorder)):
                return False
            self.last = case
        except Exception:  # it cannot be run again: take it for one of the many
            pass
        finally:
            self._looks += 1
            self._spent += time.perf_counter() - started
        return True
