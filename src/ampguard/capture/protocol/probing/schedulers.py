"""The probe of learning rate schedulers."""

from __future__ import annotations

import functools
import sys
from threading import get_ident
from typing import Any

from torch.optim import lr_scheduler

from ampguard import compat
from ampguard.capture.protocol.probing.witness import Call, Witness


class SchedulerProbe:
    """Tells the habits when a learning rate was moved."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._depth = 0
        """Schedulers that hold others move these in their own step."""

    def install(self) -> None:
        kinds = [k for k in vars(lr_scheduler).values() if isinstance(k, type) and "step" in vars(k)]
        for kind in dict.fromkeys(k for k in kinds if issubclass(k, lr_scheduler.LRScheduler)):
            self._witness.patches.replace(kind, "step", self._watch)

    def _watch(self, original: Call) -> Call:
        witness = self._witness
        guarded, recorder, habits, training = witness.guarded, witness.recorder, witness.habits, witness.training

        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth or compat.is_first_move(scheduler) or recorder.paused or not recorder.active:
                return original(scheduler, *args, **kwargs)
            if get_ident() != training.ident and not guarded(training.hears):
                return original(scheduler, *args, **kwargs)
            self._depth += 1
            try:
                result = original(scheduler, *args, **kwargs)
            finally:
                self._depth -= 1
            guarded(habits.schedules.moved, scheduler, sys._getframe(1))
            return result

        return step
