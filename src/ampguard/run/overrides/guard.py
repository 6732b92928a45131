"""What the guard is told of the overrides, which lie over its probes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.recorder import FlightRecorder
from ampguard.diagnose.budget import LEAST_SECONDS_OF_HEALING
from ampguard.diagnose.cases.casebook import Casebook
from ampguard.diagnose.cases.examiner import Examiner
from ampguard.run.dynamics import LearningDynamics
from ampguard.run.overrides.asked import OnNonfinite, Overrides

if TYPE_CHECKING:
    from ampguard.run.overrides.gained_scale import GainedScale
    from ampguard.run.overrides.running import RunningOverrides
    from ampguard.run.stopping import Stopping


class Guard:
    """Hands on what happens over the guard's probes, through its fault barrier."""

    def __init__(self, recorder: FlightRecorder, dynamics: LearningDynamics) -> None:
        self.recorder = self._recorder = recorder
        self._dynamics = dynamics

    def loss_scaled(self, loss: torch.Tensor, scaled: torch.Tensor, scale: GainedScale) -> None:
        """A loss was multiplied; what anybody measures of its gradients is unscaled already."""
        if self._recorder.active:
            self._recorder.barrier.call(self._note_scaled, loss, scaled, scale, sys._getframe(2))
            self._recorder.scaling.is_unscaled = True

    def _note_scaled(self, loss: torch.Tensor, scaled: torch.Tensor, scale: GainedScale, frame: FrameType) -> None:
        log, value = self._recorder.log, compat.loss_scale(scale)
        self._recorder.scaling.note(loss, scaled, scale)
        if self._recorder.counting or value is None or log.lookup(scaled) is not None:
            return
        # Inside `backward` the tape does not run, and what is differentiated has to be known.
        multiplied = log.add_operator(torch.ops.aten.mul.Tensor, (loss, value), {}, None, frame)
        if multiplied is not None:
            log.add_results(multiplied, scaled, writes=False)

    def output_is_bad(self, output: torch.Tensor | None) -> None:
        """A model returned what will spoil the loss: investigate now, not when that is differentiated.

        None: its results are well, but it has spoiled its running statistics.
        """
        recorder = self._recorder
        if recorder.active:
            was_taping = recorder.tape.is_on_stack
            if output is not None:
                recorder.barrier.call(recorder.judge.read, output, float("nan"))
            recorder.barrier.call(recorder.judge.settle_all)
            if was_taping:  # the investigation has ended it, and the step goes on
                self.keep_taping()

    def keep_taping(self) -> None:
        """Be on the tape although a function mode of ours is on, which the barrier takes for one of the script's."""
        recorder = self._recorder
        if recorder.active and not recorder.tape.is_on_stack and not recorder.counting:
            with contextlib.suppress(Exception):  # where it cannot be, what follows is not recorded
                recorder.resume_tape()

    def events(self) -> int:
        """How many events the recorder has numbered so far."""
        return self._recorder.log.next_index

    def held_off(self, optimizer: Optimizer, scale: GainedScale | None) -> None:
        """An optimizer's step was not made. `scale`: the loss scale at which its gradients were not finite."""
        if self._recorder.active:
            self._dynamics.held_off(optimizer)
            self._recorder.barrier.call(self._note, optimizer, scale)

    def _note(self, optimizer: Optimizer, scale: GainedScale | None) -> None:
        recorder = self._recorder
        recorder.before_update(optimizer, scale is not None)
        if scale is not None and not recorder.counting:
            recorder.gradients.held_off(optimizer, scale.get_scale())
        recorder.after_update(optimizer, skipped=True)
        if recorder.between_steps:
            recorder.preprocessing.bookkeeping_done(is_last=False)


def overrides_under(
    asked: Overrides | None,
    on_nonfinite: OnNonfinite,
    recorder: FlightRecorder,
    dynamics: LearningDynamics,
    casebook: Casebook,
    examiner: Examiner,
    stopping: Stopping,
    holds_off: bool = True,
) -> RunningOverrides | None:
    """The overrides of a guarded run; None where nothing is to be changed.

    `holds_off`: whether steps that are not finite are kept from the weights here, and not by an engine.
    """
    if asked is None and on_nonfinite not in ("skip", "heal"):
        return None
    from ampguard.run.overrides.patience import Patience  # here: a run that changes nothing needs none of it
    from ampguard.run.overrides.running import RunningOverrides

    if on_nonfinite == "heal":
        examiner.least_seconds = LEAST_SECONDS_OF_HEALING
    examiner.holds_off = on_nonfinite in ("skip", "heal")
    patience = Patience(lambda: recorder.steps.count, _first_of(casebook), stopping) if holds_off else None
    running = RunningOverrides(asked or Overrides(), on_nonfinite, Guard(recorder, dynamics), patience)
    casebook.came_back = running.heal_again
    casebook.as_told = running.in_options
    return running


def _first_of(casebook: Casebook) -> Callable[[], str | None]:
    def worst() -> str | None:
        incidents = casebook.incidents()
        if not incidents or incidents[0].severity == "info":
            return None
        first = incidents[0]
        place = f" in {first.module}" if first.module else ""
        return f"The cause: {first.cause}{place}, first in step {first.step}. {first.explanation}"

    return worst
