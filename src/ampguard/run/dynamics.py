"""The run's course over many steps: probes for its vital signs, its history on disk, the rules that read it.

It has a fault barrier of its own: if something here goes wrong it is said once and only this part stops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.events.operands import held_by
from ampguard.capture.record import Event, GlueOp, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.sampling.hand_updates import HandUpdates
from ampguard.capture.sampling.keeper import StretchKeeper
from ampguard.capture.sampling.later import NumbersLater
from ampguard.capture.sampling.vitals import StepVitals, Vitals
from ampguard.capture.sampling.weights import WeightSample
from ampguard.diagnose.cases.case import Case
from ampguard.diagnose.cases.casebook import Casebook
from ampguard.diagnose.cases.skipped_by_script import SkippedByScript
from ampguard.diagnose.dynamics import suspicion
from ampguard.diagnose.dynamics.alarm import Alarm
from ampguard.diagnose.dynamics.fits import is_rising
from ampguard.diagnose.dynamics.situations import Situations
from ampguard.diagnose.dynamics.stories import OF_LARGE_NUMBERS, Stories
from ampguard.diagnose.dynamics.trajectory import Trajectory
from ampguard.incident import Incident
from ampguard.replay.activations import ActivationSampling, Peaks
from ampguard.report.history import ActivationRow, EventRow, StepRow
from ampguard.report.history_writer import HistoryWriter
from ampguard.run.dynamics_probes import DynamicsProbes

ATTENTIVE_SHARE = 0.03
"""Of the training's time, while some activation grows towards its limit."""

PEAKS_A_SAMPLE = 64

FIRST_SKIPS, MANY_SKIPS = 4, 32
"""Steps that the scaler has skipped in a row from which on it is asked, in each of them, what that is; and only now and
then."""

FEWEST_LOSSES = 3
"""Losses that say what is usual."""


class LearningDynamics:
    """Watches a run over many steps."""

    def __init__(
        self, recorder: FlightRecorder, casebook: Casebook, rank: int, on_fault: Callable[[Exception], None]
    ) -> None:
        self.trajectory = Trajectory()
        self.history: HistoryWriter | None = None
        self._barrier = FaultBarrier(on_fault)
        self._recorder = recorder
        self._casebook = casebook
        self._vitals = Vitals(recorder, self._on_step, self._on_look)
        self._hand_updates = HandUpdates(recorder, self._vitals.weights)
        self._later = NumbersLater()
        self._sampling = ActivationSampling(self._barrier, self._later, self._on_peaks)
        self._step = 0
        self._is_sampled = False
        self._paused = 0.0
        self.by_script = SkippedByScript(recorder.steps.given_up)
        self.keeper = StretchKeeper(recorder, Alarm)
        self._situations = Situations(
            recorder, self.trajectory, self.keeper, self._hand_updates, rank, self._vitals.begins
        )
        self._stories = Stories(casebook, self.trajectory, self._situations, self._vitals.flush, self._note_incident)
        self._probes = DynamicsProbes(self._vitals, self.keeper, self._barrier, recorder, self._situations.stepping)
        self.on_vitals: Callable[[StepVitals], None] | None = None
        """Who else wants to know of each step's vital signs; they come some at a time, unless `flush` is called."""
        self.flush = self._vitals.flush
        self.iteration_ended = functools.partial(self._barrier.note, self._iteration_ended)
        """Iteration number `step` is over. (The recorder has hidden us.)"""

    def start(self, folder: Path, on_problem: Callable[[str], None], rank: int | None = None) -> None:
        """Begin the history and install the probes; before the recorder's, so that theirs come first in each call."""
        self.history = HistoryWriter(folder, on_problem, rank)
        self._casebook.second_opinion = self.second_opinion
        self._recorder.judge.usual_loss = self._usual_loss
        self._casebook.faint_since = lambda: suspicion.faint_since(list(self.trajectory.looks))
        self._casebook.largest_loss = lambda: max((abs(x) for _, x in self.trajectory.loss_series()), default=0.0)
        self._casebook.ends_of_stories = OF_LARGE_NUMBERS
        self._casebook.opinion_before_fixes = lambda incident: self._barrier.call(
            self._stories.opinion_before_fixes, incident
        )
        self._casebook.breach_behind = lambda cause, bad: self._barrier.call(
            self._stories.breach_behind, cause, bad.step
        )
        self._casebook.fall_behind = lambda incident: self._barrier.call(self._stories.fall_behind, incident)
        self._casebook.story_of = lambda cause: self._barrier.call(self._stories.story_of, cause)
        self._probes.install()

    def undo(self) -> None:
        """Take the probes out."""
        self._probes.undo()

    def _usual_loss(self) -> float | None:
        known = (*self.trajectory.recent, *self._vitals.waiting)
        losses = [v.loss for v in known if v.loss is not None and math.isfinite(v.loss)]
        return max(map(abs, losses)) if len(losses) >= FEWEST_LOSSES else None

    def finish(self) -> None:
        """Take the probes out and close the history."""
        self.undo()
        self._barrier.call(self._vitals.close)
        self._barrier.call(self._later.poll, True)
        self._barrier.call(self._end)
        if self.history is not None:
            self.history.close()

    def root_entering(self) -> None:
        """A root module is about to be called: in a sampled step it is watched. What runs outside modules never is."""
        if self._is_sampled and self._recorder.live is None and self._sampling.wants_call():
            self._recorder.live = _OneCall(self._recorder, self._sampling)

    def pause(self, seconds: float) -> None:
        """Time that an investigation took does not count as the step's."""
        self._paused += seconds

    def held_off(self, optimizer: Optimizer) -> None:
        """A step was not made, and no probe saw it: it was held off over them."""
        self._barrier.call(self._vitals.after_update, optimizer, True)

    def second_opinion(self, incident: Incident) -> Incident | Case:
        """A failure was explained: does it end a longer story? The forecast that said so is withdrawn for it."""
        return self._barrier.call(self._stories.second_opinion, incident) or incident

    # --- what the vital signs tell --------------------------------------------------------------------------------

    def _iteration_ended(self, step: int) -> None:
        self._step = step
        paused, self._paused = self._paused, 0.0
        if self.keeper.turns:
            turns, self.keeper.turns = self.keeper.turns, []
            self.trajectory.add_turns(step, turns)
        self.keeper.iteration_ended(step)
        is_looked_at = self._vitals.looks
        if self._hand_updates.begun is not None:
            self._hand_updates.end()
        self._vitals.iteration_ended(step, paused)
        if is_looked_at and self._recorder.steps.counts_backwards:
            self._hand_updates.begin(step)
        recorder, sampling = self._recorder, self._sampling
        if self._is_sampled:
            sampling.iteration_ended(step, self._situations.rate())
        is_due = not recorder.counting and step + 1 >= sampling.allowance.not_before and sampling.is_due(step + 1)
        self._is_sampled = is_due
        recorder.tells_forward = is_due or recorder.ends_run
        if is_due:
            recorder.pace.is_resting = False  # a call without gradients is watched too

    def _on_step(self, vitals: StepVitals) -> None:
        self.trajectory.add(vitals)
        self.by_script.ended(vitals)
        if self.on_vitals is not None:
            self.on_vitals(vitals)
        if self.keeper.is_late:
            self.keeper.heard_later(vitals.loss)
        if self.history is not None:
            self.history.step(StepRow._make(vitals))
        skips = self.trajectory.skips_in_a_row
        if skips >= FIRST_SKIPS and (skips <= MANY_SKIPS or not skips % MANY_SKIPS):
            self._stories.fall_goes_on(vitals.step)

    def _on_look(self, sample: WeightSample) -> None:
        self.trajectory.look(sample)
        norm, casebook = sample.weight_norm, self._casebook
        if norm is not None and not math.isfinite(norm):
            casebook.past.weights_were_bad(sample.step)
        self._stories.ask("look", sample.step)
        for text in suspicion.gradient_underflow(self._stories.situation(sample.step)) if self._is_in_half() else ():
            self.note(EventRow(sample.step, "gradient-underflow-suspected", text))
            # The next update's gradients are replayed in float32, for proof.
            self._recorder.gradients.suspects_underflow = True

    def _is_in_half(self) -> bool:
        """Whether the step computed in float16: other types do not lose small gradients."""
        return any(_is_in_half(event) for event in self._recorder.log.record.events)

    def _on_peaks(self, step: int, peaks: Peaks, rate: float) -> None:
        self.trajectory.activations(step, peaks, rate)
        if self.history is not None:
            for place, size in sorted(peaks.items(), key=lambda item: -item[1])[:PEAKS_A_SAMPLE]:
                dtype = str(place.dtype).removeprefix("torch.")
                self.history.activation(
                    ActivationRow(step, place.module, place.op, place.file, place.number, dtype, size)
                )
        grows = any(is_rising(peak.steps, peak.sizes) for peak in self.trajectory.watched_peaks())
        self._sampling.allowance.attend(ATTENTIVE_SHARE if grows else 0.0)
        if grows:
            self._stories.foresee(step)

    def _end(self) -> None:
        """The run is over: the slices that were kept at its first steps are compared once more."""
        sample = self._vitals.weights.last_look(self._step)
        if sample is not None:
            self.trajectory.look(sample)
            self._stories.ask("end", self._step)
        self.by_script.settle(self._casebook.cases, self._casebook.trained())

    def note(self, row: EventRow) -> None:
        if self.history is not None:
            self.history.event(*row)

    def _note_incident(self, incident: Incident) -> None:
        self.note(EventRow(incident.step, incident.cause, incident.explanation))


class _OneCall:
    """The sampler as the recorder's live tracer for the next root call and for nothing after it."""

    def __init__(self, recorder: FlightRecorder, sampling: ActivationSampling) -> None:
        self._recorder = recorder
        self._sampling = sampling

    def begin_step(self) -> None:
        self._recorder.live = None

    def watch(self, event: Event) -> AbstractContextManager[Any]:
        self._recorder.live = None
        return self._sampling.watch(event)


def _is_in_half(event: Event) -> bool:
    if isinstance(event, RootCall):
        in_half = event.modes.autocast_dtype == torch.float16
        return in_half or any(p.dtype == torch.float16 for p in compat.all_parameters(event.module))
    return isinstance(event, GlueOp) and (
        event.kwargs.get("dtype") == torch.float16 or any(h.tensor.dtype == torch.float16 for h in held_by(event))
    )
