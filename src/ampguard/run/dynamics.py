"""The run's course over many steps: probes for its vital signs, its history on disk, the rules that read it.

It has a fault barrier of its own: if something here goes wrong it is said once and only this part stops.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.hand_updates import HandUpdates
from ampguard.capture.keeper import StretchKeeper
from ampguard.capture.later import NumbersLater
from ampguard.capture.operands import held_by
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.record import Event, GlueOp, Line, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.vitals import StepVitals, Vitals
from ampguard.capture.weights import WeightSample
from ampguard.diagnose.casebook import Casebook
from ampguard.diagnose.cases import Case
from ampguard.diagnose.dynamics import suspicion
from ampguard.diagnose.dynamics.alarm import Alarm
from ampguard.diagnose.dynamics.breached import breach_behind, is_too_large
from ampguard.diagnose.dynamics.finding import Moment, Situation, ask
from ampguard.diagnose.dynamics.fits import is_rising
from ampguard.diagnose.dynamics.scale_collapse import ITS_GRADIENTS
from ampguard.diagnose.dynamics.trajectory import Trajectory
from ampguard.diagnose.dynamics.turns import diverging
from ampguard.diagnose.skipped_by_script import SkippedByScript
from ampguard.incident import Incident
from ampguard.replay.activations import ActivationSampling, Peaks
from ampguard.replay.names import parameter_name
from ampguard.replay.stretch import StretchReplay
from ampguard.report.history import ActivationRow, EventRow, HistoryWriter, StepRow
from ampguard.run.dynamics_probes import DynamicsProbes

ATTENTIVE_SHARE = 0.03
"""Of the training's time, while some activation grows towards its limit."""

MAX_STRETCH_REPLAYS = 3
"""Failures for which the steps before are run again: each may take as long as many steps."""

PEAKS_A_SAMPLE = 64
OF_LARGE_NUMBERS = frozenset({"fp16-overflow", "overflow", "indeterminate", "gradient-overflow", "loss-scale-overflow"})
"""What weights that have diverged bring about wherever they are used."""

SUPERSEDED_BY = frozenset({"fp16-overflow", "overflow", "divergence"})


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
        self._rank = rank
        self._vitals = Vitals(recorder, self._on_step, self._on_look)
        self._hand_updates = HandUpdates(recorder, self._vitals.weights)
        self._later = NumbersLater()
        self._sampling = ActivationSampling(self._barrier, self._later, self._on_peaks)
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._lines: dict[int, Line] = {}
        self._step = 0
        self._is_sampled = False
        self._paused = 0.0
        self._told: dict[str, Case] = {}
        self._names: dict[int, tuple[weakref.ref[Tensor], str | None]] = {}
        self._forecast: Case | None = None
        self._replays_left = MAX_STRETCH_REPLAYS
        self.by_script = SkippedByScript()
        self._asked: Situation | None = None
        """Of the failure that is being explained: what was replayed for it is not replayed again."""
        self.keeper = StretchKeeper(recorder, Alarm)
        self._probes = DynamicsProbes(self._vitals, self.keeper, self._barrier, recorder, self._stepping)
        self.on_vitals: Callable[[StepVitals], None] | None = None
        """Who else wants to know of each step's vital signs; they come some at a time, unless `flush` is called."""
        self.flush = self._vitals.flush

    def start(self, folder: Path, on_problem: Callable[[str], None], rank: int | None = None) -> None:
        """Begin the history and install the probes; before the recorder's, so that theirs come first in each call."""
        self.history = HistoryWriter(folder, on_problem, rank)
        self._casebook.second_opinion = self.second_opinion
        self._casebook.faint_since = lambda: suspicion.faint_since(list(self.trajectory.looks))
        self._casebook.ends_of_stories = OF_LARGE_NUMBERS
        self._casebook.opinion_before_fixes = lambda incident: self._barrier.call(self._opinion_before_fixes, incident)
        self._casebook.breach_behind = lambda cause, bad: self._barrier.call(self._breach_behind, cause, bad.step)
        self._casebook.story_of = lambda cause: self._barrier.call(self._story_of, cause)
        self._probes.install()

    def undo(self) -> None:
        """Take the probes out."""
        self._probes.undo()

    def finish(self) -> None:
        """Take the probes out and close the history."""
        self.undo()
        self._barrier.call(self._vitals.close)
        self._barrier.call(self._later.poll, True)
        self._barrier.call(self._end)
        if self.history is not None:
            self.history.close()

    def iteration_ended(self, step: int) -> None:
        """Iteration number `step` is over."""
        self._barrier.call(self._iteration_ended, step)

    def root_entering(self) -> None:
        """A root module is about to be called: in a sampled step it is watched. What runs outside modules never is."""
        if self._is_sampled and self._recorder.live is None and torch.is_grad_enabled():
            self._recorder.live = _OneCall(self._recorder, self._sampling)

    def pause(self, seconds: float) -> None:
        """Time that an investigation took does not count as the step's."""
        self._paused += seconds

    def held_off(self, optimizer: Optimizer) -> None:
        """A step was not made, and no probe saw it: it was held off over them."""
        self._barrier.call(self._vitals.after_update, optimizer, True)

    def second_opinion(self, incident: Incident) -> Incident | Case:
        """A failure was explained: does it end a longer story? The forecast that said so is withdrawn for it."""
        return self._barrier.call(self._second_opinion, incident) or incident

    # --- what the vital signs tell --------------------------------------------------------------------------------

    def _iteration_ended(self, step: int) -> None:
        self._step = step
        paused, self._paused = self._paused, 0.0
        if self.keeper.turns:
            turns, self.keeper.turns = self.keeper.turns, []
            self.trajectory.add_turns(step, turns)
        self.keeper.iteration_ended(step)
        is_looked_at = self._vitals.looks
        if self._hand_updates.has_begun:
            self._hand_updates.end()
        self._vitals.iteration_ended(step, paused)
        if is_looked_at and self._recorder.steps.counts_backwards:
            self._hand_updates.begin(step)
        recorder, sampling = self._recorder, self._sampling
        if self._is_sampled:
            sampling.iteration_ended(step, self._rate())
        is_due = step + 1 >= sampling.allowance.not_before and sampling.is_due(step + 1) and not recorder.counting
        self._is_sampled = recorder.tells_forward = is_due

    def _on_step(self, vitals: StepVitals) -> None:
        self.trajectory.add(vitals)
        self.by_script.ended(vitals)
        if self.on_vitals is not None:
            self.on_vitals(vitals)
        if self.keeper.is_late:
            self.keeper.heard_later(vitals.loss)
        if self.history is not None:
            self.history.step(StepRow._make(vitals))
        if self.trajectory.skips_in_a_row >= 4:
            self._merge_gradients_of_told_lines()
            self._ask("step", vitals.step)

    def _on_look(self, sample: WeightSample) -> None:
        self.trajectory.look(sample)
        norm, casebook = sample.weight_norm, self._casebook
        if norm is not None and not math.isfinite(norm):
            casebook.past.weights_were_bad(sample.step)
        self._ask("look", sample.step)
        for text in suspicion.gradient_underflow(self._situation(sample.step)) if self._is_in_half() else ():
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
        if grows and self._forecast is None and not self._has_overflowed:
            for incident in ask("peaks", self._situation(step)):
                self._forecast = self._add(incident)

    @property
    def _has_overflowed(self) -> bool:
        return any(c.incident.cause in SUPERSEDED_BY and c.incident.mode == "train" for c in self._casebook.cases)

    def _end(self) -> None:
        """The run is over: the slices that were kept at its first steps are compared once more."""
        sample = self._vitals.weights.last_look(self._step)
        if sample is not None:
            self.trajectory.look(sample)
            self._ask("end", self._step)
        self.by_script.settle(self._casebook.cases, self._casebook.trained())

    def note(self, row: EventRow) -> None:
        if self.history is not None:
            self.history.event(*row)

    # --- incidents ------------------------------------------------------------------------------------------------

    def _ask(self, moment: Moment, step: int) -> None:
        for incident in ask(moment, self._situation(step), self._told):
            if incident.cause not in self._told:
                breach = self._breach_behind(incident.cause, step)
                if breach is not None:
                    Case(incident, ("", None, None, None), last_step=incident.step).follows_from(breach, incident.cause)
                self._told[incident.cause] = breach or self._add(incident)

    def _worst_of_fall(self) -> Case | None:
        """The case behind the steps that the scaler is skipping at present."""
        since = self.trajectory.falling_since
        falling = [
            case
            for case in self._casebook.cases
            if since is not None
            and case.part_of is None
            and case.last_step >= since
            and case.incident.mode == "train"
            and case.incident.phase != "protocol"
        ]
        return max(falling, key=lambda case: case.occurrences, default=None)

    def _add(self, incident: Incident) -> Case:
        self.note(EventRow(incident.step, incident.cause, incident.explanation))
        behind = self._worst_of_fall() if incident.cause == "scale-collapse" else None
        if behind is not None and behind.incident.cause in ITS_GRADIENTS:
            self._casebook.retell(behind, incident)
            for case in self._casebook.cases:
                if case is not behind and case.incident.cause in ITS_GRADIENTS and self._is_of_fall(case):
                    self._casebook.merge(case, behind)
            return behind
        return self._casebook.add(incident, poisons=incident.cause == "optimizer-underflow")

    def _merge_gradients_of_told_lines(self) -> None:
        """Gradients that overflow at the line at which the forward pass fails in other steps of the fall: one failure."""
        falling = [
            case for case in self._casebook.cases if self._is_of_fall(case) and case.incident.severity == "error"
        ]
        forward = {_line_of(c.incident): c for c in falling if c.incident.phase in ("forward", "loss")}
        for case in falling:
            story = forward.get(_line_of(case.incident))
            if story is not None and case.incident.phase == "backward" and case.incident.location is not None:
                self._casebook.merge(case, story)

    def _is_of_fall(self, case: Case) -> bool:
        """Whether it was first seen while the loss scale was falling as it is now."""
        since = self.trajectory.falling_since
        return since is not None and case.incident.step >= since and case.part_of is None

    def _opinion_before_fixes(self, incident: Incident) -> Incident | Case | None:
        """The cause of a failure is known, and no fix was looked for. Does it end a longer story? Fixes of that one step would be
        of no use then."""
        self._asked = situation = self._situation_of(incident)
        answer = self._answer_to(situation, incident)
        return self._in_its_story(answer) if answer.cause == "divergence" else None

    def _second_opinion(self, incident: Incident) -> Incident | Case:
        asked, self._asked = self._asked, None
        if asked is None or asked.failure is None or _place_of(asked.failure) != _place_of(incident):
            asked = self._situation_of(incident)
        asked.failure = incident
        return self._in_its_story(self._answer_to(asked, incident))

    def _situation_of(self, incident: Incident) -> Situation:
        self._vitals.flush()
        situation = self._situation(incident.step)
        situation.failure = incident
        running = [x for x in self._recorder.judge.losses if type(x) is float and math.isfinite(x)]
        situation.running = [(incident.step, loss) for loss in running]
        stretch = self.keeper.with_running_step() if self._replays_left else None
        self._replays_left -= stretch is not None
        situation.whose = whose = diverging(situation, len(self.keeper.turns))
        if whose is not None:
            situation.trajectory = self.trajectory.of(whose)
        situation.stretch = StretchReplay(stretch, self._recorder, whose) if stretch is not None else None
        return situation

    def _answer_to(self, situation: Situation, incident: Incident) -> Incident:
        for answer in ask("failure", situation):
            incident = answer
        return incident

    def _in_its_story(self, incident: Incident) -> Incident | Case:
        """The case of a story that was told, where the failure belongs to it; a forecast is withdrawn for what it foretold."""
        told = self._case_of_story(incident)
        if told is not None:
            return told
        forecast = self._forecast
        if forecast is not None and is_foretold(forecast.incident, incident):
            said = forecast.incident
            facts = {"forecast_at_step": said.step, "forecast_steps_left": said.evidence["steps_left"]}
            incident = msgspec.structs.replace(incident, evidence={**incident.evidence, **facts})
            if forecast in self._casebook.cases:
                self._casebook.cases.remove(forecast)
            self._forecast = None
        self._told.setdefault(incident.cause, Case(incident, ("", None, None, None)))
        self.note(EventRow(incident.step, incident.cause, incident.explanation))
        return incident

    def _case_of_story(self, incident: Incident) -> Case | None:
        """The case of a divergence or a collapse that was told, where this failure is one more end of the same one."""
        collapse = self._told.get("scale-collapse")
        if collapse is not None and incident.cause in ITS_GRADIENTS and self.trajectory.falling_since is not None:
            return collapse
        if incident.cause in OF_LARGE_NUMBERS:
            return self._divergence_that_goes_on()
        known = [c for c in self._casebook.cases if c.incident.cause == "divergence" and c.part_of is None]
        began = incident.evidence.get("began_at_step")
        if incident.cause != "divergence" or began is None:
            return None
        same = next((case for case in known if case.incident.step >= began), None)
        return same or self._thrown_away_by(began, incident)

    def _story_of(self, cause: str | None) -> Case | None:
        """The divergence that a failure of this cause (None: of any) would be one more end of, before it is looked at any
        closer."""
        if cause is not None and cause not in OF_LARGE_NUMBERS:
            return None
        self._vitals.flush()
        return self._divergence_that_goes_on()

    def _breach_behind(self, cause: str, step: int) -> Case | None:
        if not any(is_too_large(case, step) for case in self._casebook.cases):
            return None
        self._vitals.flush()
        return breach_behind(cause, self._casebook.cases, self._situation(step))

    def _divergence_that_goes_on(self) -> Case | None:
        told = [c for c in self._casebook.cases if c.incident.cause == "divergence" and c.part_of is None]
        return next((case for case in told if self._goes_on(case)), None)

    def _thrown_away_by(self, began: int, divergence: Incident) -> Case | None:
        """The failure whose own update has thrown the weights away: when it was told, they were as they should be."""
        updated = {v.step for v in self.trajectory.recent if v.skipped is False and began <= v.step < divergence.step}
        cases = [c for c in self._casebook.cases if c.part_of is None and c.incident.severity == "error"]
        own = [c for c in cases if c.incident.step in updated and c.incident.cause in OF_LARGE_NUMBERS]
        return next((c for c in own if c.incident.mode == "train"), None)

    def _goes_on(self, divergence: Case) -> bool:
        """Whether no loss since it was told has been as low as those before it began: the weights are still as large."""
        facts = divergence.incident.evidence
        began, best = facts.get("began_at_step"), facts.get("best_loss", math.inf)
        return began is not None and not self.trajectory.has_come_down(began, divergence.incident.step, best)

    def _situation(self, step: int) -> Situation:
        worst = self._worst_of_fall()
        known = worst.result() if worst is not None else None
        optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        situation = Situation(self.trajectory, step, self._rank, None, known, optimizers, self._lines, self._name_of)
        situation.by_hand = self._hand_updates.last
        return situation

    def _name_of(self, parameter: Tensor) -> str | None:
        """A parameter's name, looked up once: where no recent call tells it, every object has to be asked."""
        known = self._names.get(id(parameter))
        if known is None or known[0]() is not parameter:
            roots = {id(e.module): e for e in self._recorder.log.record.events if isinstance(e, RootCall)}
            name = parameter_name(parameter, [(e.module, e.prefix) for e in roots.values()])
            known = self._names[id(parameter)] = (weakref.ref(parameter), name)
        return known[1]

    def _stepping(self, optimizer: Optimizer) -> None:
        """An optimizer steps for the first time, or in a step that is looked at."""
        if all(ref() is not optimizer for ref in self._optimizers):
            self._optimizers = [ref for ref in self._optimizers if ref() is not None]
            self._optimizers.append(weakref.ref(optimizer))
            self._vitals.begins(optimizer)
        if id(optimizer) not in self._lines:
            line = script_line(sys._getframe(1))
            if line is not None:
                self._lines[id(optimizer)] = line

    def _rate(self) -> float:
        rates = [
            float(group.get("lr", 0.0))
            for ref in self._optimizers
            if (optimizer := ref()) is not None
            for group in optimizer.param_groups
        ]
        return max(rates, default=0.0)


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


def _place_of(incident: Incident) -> tuple[int, str, str | None, str | None]:
    return incident.step, incident.cause, incident.module, incident.op


def _line_of(incident: Incident) -> tuple[str, int] | None:
    return (incident.location.file, incident.location.line) if incident.location is not None else None


def is_foretold(forecast: Incident, incident: Incident) -> bool:
    """Whether the failure is what the forecast spoke of."""
    if incident.cause not in SUPERSEDED_BY or incident.mode != "train":
        return False
    return incident.cause == "divergence" or incident.module == forecast.module or incident.op == forecast.op


def _is_in_half(event: Event) -> bool:
    if isinstance(event, RootCall):
        in_half = event.modes.autocast_dtype == torch.float16
        return in_half or any(p.dtype == torch.float16 for p in event.module.parameters())
    return isinstance(event, GlueOp) and (
        event.kwargs.get("dtype") == torch.float16 or any(h.tensor.dtype == torch.float16 for h in held_by(event))
    )
