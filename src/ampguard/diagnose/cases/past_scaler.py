"""Gradients that overflow at the loss scale where an optimizer is stepped past the scaler.

A scaler would have skipped that step: it is no failure of its own, but a part of `bypassed-scaler`. Which of the two is
noticed first depends on the script, so the overflow waits for a while before it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ampguard.capture.record import BadResult
from ampguard.diagnose.cases.case import Case
from ampguard.incident import Incident

ONLY_THE_SCALE, PAST_SCALER = "loss-scale-overflow", "bypassed-scaler"


class PastScaler:
    """Which overflow belongs to which step past the scaler."""

    def __init__(self, tell: Callable[[Incident], None]) -> None:
        self.may_wait = True
        """Whether a failure may be told after the update that is made with it: not where telling it ends the run."""
        self._tell = tell
        self.untold: Case | None = None

    def is_kept_back(self, case: Case, bad: BadResult) -> bool:
        """Whether what comes next tells if this new case is the failure. It is told later, or not at all."""
        if not (self.may_wait and is_only_the_scale(case.incident.cause, bad)):
            return False
        self.untold = case
        return True

    def was_noticed(self, breach: Case) -> Case | None:
        """A broken protocol was: the overflow that is a part of it from now on, and no incident of its own."""
        if breach.incident.cause != PAST_SCALER or self.untold is None:
            return None
        overflow, self.untold = self.untold, None
        overflow.follows_from(breach, overflow.incident.cause)
        return overflow

    def noticed_before(self, bad: BadResult, cases: Sequence[Case]) -> Case | None:
        """The step past the scaler that was told and that this overflow is a part of."""
        steps = (c for c in reversed(cases) if c.incident.cause == PAST_SCALER)
        return next((c for c in steps if c.last_step >= bad.step - 1), None)

    def tick(self, step: int) -> None:
        """An iteration ended."""
        if self.untold is not None and step > self.untold.incident.step + 1:
            self.close()

    def close(self) -> None:
        """Nothing came that the overflow is a part of."""
        untold, self.untold = self.untold, None
        if untold is not None:
            self._tell(untold.incident)


def is_only_the_scale(cause: str, bad: BadResult) -> bool:
    """Whether a scaler would have skipped this step, and was not asked."""
    return bad.is_past_scaler and cause == ONLY_THE_SCALE
