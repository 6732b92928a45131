"""Steps that the scaler skips: which of them are worth a look?

Most are the scaler finding its scale, and nothing is wrong. One may be a bad sample at step 41,000. So each is looked at
(one replay at a loss scale of 1) as long as looking takes next to no time of the run.
"""

from __future__ import annotations

import time

FREE_LOOKS = 8
TIME_SHARE = 0.02
UNREPLAYABLE_BEFORE_ARMING = 3


class SkippedSteps:
    """Keeps the time spent on skipped steps small."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._looks = 0
        self._spent = 0.0
        self._unreplayable = 0

    def may_look(self) -> bool:
        if self._looks < FREE_LOOKS:
            return True
        return self._spent < TIME_SHARE * (time.perf_counter() - self._started)

    def looked(self, seconds: float) -> None:
        self._looks += 1
        self._spent += seconds

    def cannot_be_replayed(self) -> bool:
        """A skipped step cannot be run again. True once there were so many that the next ones should be watched live."""
        self._unreplayable += 1
        return self._unreplayable == UNREPLAYABLE_BEFORE_ARMING
