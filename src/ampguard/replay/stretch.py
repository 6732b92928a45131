"""Running a stretch of steps again, one after the other, on copies of the weights: as they ran, or with other updates.

Forward, glue and backward of each step are those of `rebuild`; between them a copy of the script's own optimizer steps
on the copied parameters. The inputs are those of the steps as they ran. Whether that tells the whole story, the losses
show: as they ran, the steps must give the losses that were seen.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from torch.optim import Optimizer

from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.sampling.stretch import KeptStep, Stretch
from ampguard.errors import ReplayError
from ampguard.replay.sandbox import neutral_thread
from ampguard.replay.stretch_step import StepReplay
from ampguard.replay.stretch_updates import AS_IT_RAN, Change, Copies, Updates, limits_of

SECONDS = 5.0
STEPS_WORTH = 150.0
"""A stretch may be replayed for so many times the duration of a step, and at least `SECONDS`."""


@dataclass(slots=True)
class Course:
    """What the steps came to: their losses, as far as they got. `failed_at`: the first step that was not finite."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    """Of several optimizers' losses those of the one that is asked about, if one is; `totals`: of all."""
    totals: list[tuple[int, float]] = field(default_factory=list)
    failed_at: int | None = None
    skipped: int = 0
    updates: int = 0
    weights_apart: float | None = None
    """||replayed weights - the script's weights now|| / ||the script's||; None where those are not finite."""
    seen_by: int | None = None
    """Where the last step has no loss of its own: the step whose batch the last of the `losses` is of, on the weights that
    the updates led to."""

    @property
    def highest(self) -> float:
        return max((abs(loss) for _, loss in self.losses), default=0.0)


class StretchReplay:
    """Replays one stretch, as often as asked, within a time."""

    def __init__(self, stretch: Stretch, recorder: FlightRecorder, whose: Optimizer | None = None) -> None:
        """`whose`: of several optimizers the one whose losses are asked for, and whose updates are changed."""
        self.stretch = stretch
        self.only = stretch.snapshot.number_of(whose) if whose is not None and stretch.segments else None
        self._recorder = recorder
        self._deadline = time.perf_counter() + max(SECONDS, STEPS_WORTH * recorder.step_seconds)
        self._limits: dict[int, float] = {}
        """For each optimizer whose gradients the script clips: at which norm."""
        self._norms: list[tuple[int, float, float]] = []
        """(optimizer, norm of the replayed gradients, norm of those that were used)."""

    def as_it_ran(self) -> Course:
        """The steps unchanged."""
        self._norms.clear()
        return self._run(AS_IT_RAN)

    def learn_clipping(self) -> None:
        """Find out, from the steps as they ran, at which norm the script clips its gradients. Raises ReplayError."""
        self._limits = limits_of(self._norms)

    def with_change(self, change: Change) -> Course:
        """The steps with other updates. Their last loss is one that the last of these updates came before."""
        return self._run(change, wants_last_loss=True)

    def failing_step_before(self) -> Course:
        """The last step alone, on the weights that the stretch began with."""
        with neutral_thread():
            course = Course()
            failing = self.stretch.failing or self.stretch.steps[-1]
            self._step(failing, Copies(self.stretch), AS_IT_RAN, course)
            return course

    def earlier_step_now(self) -> Course:
        """The last step before the one that failed, alone, on the weights of now."""
        with neutral_thread():
            course, copies = Course(), Copies(self.stretch)
            copies.take_present()
            earlier = [step for step in self.stretch.steps if step is not self.stretch.failing]
            self._step(earlier[-1], copies, AS_IT_RAN, course)
            return course

    def loss_of(self, step: KeptStep) -> float | None:
        """The loss of a step as it was seen: of the optimizer that is asked about."""
        return step.loss if self.only is None else step.loss_of(self.only)

    def _run(self, change: Change, wants_last_loss: bool = False) -> Course:
        course = Course()
        copies = Copies(self.stretch)
        with neutral_thread():
            for step in self.stretch.steps:
                if time.perf_counter() > self._deadline:
                    raise ReplayError("there was no time to run all of these steps again")
                self._step(step, copies, change, course)
                if course.failed_at is not None:
                    break
            course.weights_apart = copies.apart()
            if wants_last_loss and course.failed_at is None:
                self._see_by_earlier(copies, change, course)
        return course

    def _see_by_earlier(self, copies: Copies, change: Change, course: Course) -> None:
        """Where the failing step came to no loss: that of the last batch before it, on the weights that it was given."""
        *earlier, last = self.stretch.steps
        if last is not self.stretch.failing or any(number == last.number for number, _ in course.losses):
            return
        step = next((step for step in reversed(earlier) if self.loss_of(step) is not None), None)
        if step is None:
            return
        again = Course()
        self._step(step, copies, change, again)
        if again.failed_at is not None or not again.losses:
            course.failed_at = last.number
            return
        course.losses.append((last.number, again.losses[-1][1]))
        course.seen_by = step.number

    def _step(self, step: KeptStep, copies: Copies, change: Change, course: Course) -> None:
        updates = Updates(change, self.only, self._limits, self._norms)
        replay = StepReplay(step, self._recorder, copies, updates)
        loss, is_finite = replay.carry_out()
        own = loss if self.only is None else replay.own_loss
        course.skipped += replay.skipped
        course.updates += replay.updated
        if loss is not None and math.isfinite(loss):
            course.totals.append((step.number, loss))
        if own is not None and math.isfinite(own):
            course.losses.append((step.number, own))
        if not is_finite or (loss is not None and not math.isfinite(loss)):
            course.failed_at = step.number
