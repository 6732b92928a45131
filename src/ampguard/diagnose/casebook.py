"""The incidents of a run: which failure is investigated, which is one that was seen before, which a consequence."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import msgspec
import torch

from ampguard import compat
from ampguard.capture.record import BadResult, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.schedule import FIRST_STEPS
from ampguard.diagnose.arming import Arming
from ampguard.diagnose.awaiting import Awaited, Awaiting
from ampguard.diagnose.bad_since import BadSince
from ampguard.diagnose.budget import LEAST_SECONDS, Budget
from ampguard.diagnose.cases import Case, place_of
from ampguard.diagnose.causes.gradient_underflow import prove_underflow
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, find_cause
from ampguard.diagnose.further import FurtherFailures
from ampguard.diagnose.hooked import changed_by_a_hook
from ampguard.diagnose.investigate import (
    explain,
    explain_at_once,
    explain_trace,
    locate,
    locate_in_trace,
    unexplained_incident,
)
from ampguard.diagnose.past_scaler import PastScaler, is_only_the_scale
from ampguard.diagnose.poison import Poison
from ampguard.diagnose.recurrence import calls_behind
from ampguard.diagnose.sharded import bad_input, may_await, with_advice
from ampguard.diagnose.skipped import SkippedSteps
from ampguard.diagnose.wire_overflow import overflow_on_the_wire
from ampguard.errors import ChangedSinceError, DoesNotRepeatError, ReplayError, StopRun
from ampguard.incident import Incident, importance
from ampguard.replay.live import LiveTracing
from ampguard.replay.rebuild import Replayer
from ampguard.replay.sandbox import neutral_thread

LOOKS_PER_INVESTIGATION = 4
"""How many further failures are located, to see whether they are new, for each full investigation allowed."""

FORWARDS_PER_STEP = 4
"""How many forward passes a step takes at most, where no other step has shown it: a backward pass is about two."""

NOT_REPEATED = "run again, it has finite gradients: something changed them between backward and the optimizer's step"
MAX_PROOFS = 3
"""Suspicions of gradient-underflow that are followed."""


class Casebook:
    """Examines bad results one by one, within limits that keep a run that fails at every step going."""

    def __init__(
        self,
        recorder: FlightRecorder,
        max_incidents: int,
        rank: int,
        on_new: Callable[[Incident], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self.cases: list[Case] = []
        self._recorder = recorder
        self._max_incidents = max_incidents
        self._rank = rank
        self._on_new = on_new
        self._on_fault = on_fault
        self.least_seconds = LEAST_SECONDS
        """What an investigation may take, however quick the step is."""
        self._looks = 0
        self._proofs = 0
        self._skipped = SkippedSteps(recorder)
        self._further = FurtherFailures()
        self._poison = Poison(recorder)
        self._past = BadSince(recorder)
        self._arming = Arming(recorder)
        self._awaiting = Awaiting(recorder, self._settle)
        self.past_scaler = PastScaler(self._tell)
        self._told_later: list[Incident] | None = None
        """What is found out while models are not as the script has made them: whoever hears of it may change them."""
        self.second_opinion: Callable[[Incident], Incident | Case] = lambda incident: incident
        """Asked about each new failure by those who know the run's history: is it the end of a longer story, or (a case)
        of one that has been told?"""
        self.ends_of_stories: frozenset[str] = frozenset()
        """Causes of which the same is asked before fixes are looked for."""
        self.opinion_before_fixes: Callable[[Incident], Incident | Case | None] = lambda incident: None
        """Asked then; None where it is no end of a longer story."""
        self.story_of: Callable[[str | None], Case | None] = lambda cause: None
        """Asked about a cause (None: whatever it is) before fixes are tried: of which case that was told would it be one
        more end?"""
        self.breach_behind: Callable[[str, BadResult], Case | None] = lambda cause, bad: None
        """Asked about the same: from which broken protocol that was told does it follow?"""
        self.came_back: Callable[[Incident], None] = lambda incident: None
        """Told of a failure that is counted to an earlier one, as that with the step of this."""

    def add(
        self, incident: Incident, poisons: bool = False, optimizer: weakref.ref[torch.optim.Optimizer] | None = None
    ) -> Case:
        """Take in an incident that needed no replay: a broken protocol, a course over many steps.

        `poisons`: an optimizer has just made its parameters non-finite; what fails from now on is its doing.
        `optimizer`: whose gradients a broken protocol is about.
        """
        case = Case(
            incident, ("", None, None, None), self._recorder.attempts, last_step=incident.step, is_investigated=False
        )
        case.optimizer = optimizer
        self.cases.append(case)
        if poisons:
            self._poison.began_with(case)
        overflow = self.past_scaler.was_noticed(case)
        if overflow is not None:
            self._poison.is_told_as(overflow, case)
        self._tell(incident)
        return case

    def _tell(self, incident: Incident) -> None:
        """Tell of a new incident. What prints the first card imports libraries, and one of them draws from `random`."""
        if self._told_later is not None:
            self._told_later.append(incident)
            return
        with neutral_thread():
            self._on_new(incident)

    def weights_were_bad(self, step: int) -> None:
        """A look at the weights has found some that were not finite."""
        if self._past.weights_bad_since is None:
            self._past.weights_bad_since = step

    def trained(self) -> list[torch.Tensor]:
        """What the optimizers that have stepped hold and move: frozen parameters are left out."""
        held = [(o, p) for o in self._recorder.stepped_since(0) for group in o.param_groups for p in group["params"]]
        return [p for optimizer, p in held if p.requires_grad or p in getattr(optimizer, "state", ())]

    def retell(self, case: Case, incident: Incident) -> None:
        """The same failure, better understood: the case goes on under another cause."""
        case.incident = incident
        self._tell(incident)

    def merge(self, case: Case, story: Case) -> None:
        """This case is a part of a longer story: it is no incident of its own any more."""
        if story.is_breach:
            case.follows_from(story)
            return
        case.part_of = story
        story.occurrences += case.occurrences

    def incidents(self) -> tuple[Incident, ...]:
        """The incidents so far, the most important first."""
        return tuple(sorted([case.result() for case in self.cases if case.part_of is None], key=importance))

    @property
    def is_used_up(self) -> bool:
        """Whether every investigation that was allowed has been made."""
        investigated = sum(case.is_investigated for case in self.cases)
        return investigated >= self._max_incidents or self._looks >= LOOKS_PER_INVESTIGATION * self._max_incidents

    def examine(self, bad: BadResult) -> None:
        """Find out what a bad result is: new, known, a consequence, or no failure at all."""
        if self._recorder.counting:
            self._count_as_known(bad)
            return
        with neutral_thread():
            if bad.kind == "underflow":
                self._look_for_underflow(bad)
                return
            self._examine(bad)
        if self.is_used_up:
            self._recorder.counting = True
            self._recorder.live = None

    def _examine(self, bad: BadResult) -> None:
        started = time.perf_counter()
        self._awaiting.settle_what_is_due()
        if self.is_used_up:
            return
        if self._poison.explains(bad):
            if self._poison.case is None:
                self._arming.weights_are_bad()
            return
        if self._skipped.is_known(bad, self.cases):
            return
        live = self._arming.live
        if live is None and self._is_like_a_known_one(bad):
            return
        self._looks += 1
        self._further.begin(bad)
        try:
            if live is not None:
                self._examine_trace(bad, live)
            else:
                self._investigate(bad, started)
        finally:
            self._further.end()

    def _is_like_a_known_one(self, bad: BadResult) -> bool:
        """Whether a failure is counted to one that was told, without seeing where it begins."""
        step_seconds = self._recorder.step_seconds
        case = self._further.case_of(bad, lambda: self.story_of(None), step_seconds, self.least_seconds)
        if case is not None:
            self._came_back(case, bad, calls_behind(bad))
        return case is not None

    def _investigate(self, bad: BadResult, started: float) -> None:
        """Run it again, and say what is seen."""
        try:
            evidence = self._located(bad)
        except DoesNotRepeatError:
            if compat.several_ranks() and self._is_lost_on_the_wire(bad):
                return
            hooked = changed_by_a_hook(bad, self._rank) if bad.error is None else None
            if hooked is not None:
                self._open_unreplayed(hooked, bad)
            elif not bad.is_held_off and bad.error is None:  # (anomaly detection raises for what reaches no one, too)
                self._past.changed_gradients.append(bad)
                if not compat.several_ranks():  # else another rank's gradients are to blame, and it says so
                    self._arming.unexplained.append((bad, NOT_REPEATED))
            return
        except ReplayError as why:
            if may_await(bad):
                self._await_weights(bad, str(why))
            elif not bad.is_held_off or self._skipped.cannot_be_replayed():
                self._arm(bad, str(why))
            return
        except Exception as why:  # the module itself raised in its second run, or memory ran out
            self._arm(bad, f"{type(why).__name__}: {why}"[:300])
            return
        if evidence is None:
            self._innocent(bad)
            return
        if self._counted(bad, evidence):
            return
        forward_seconds = sum(e.seconds for e in evidence.events() if isinstance(e, RootCall))
        step_seconds = self._recorder.step_seconds
        if forward_seconds and self._recorder.steps.count <= FIRST_STEPS:  # which also load libraries and warm up
            step_seconds = min(step_seconds, FORWARDS_PER_STEP * forward_seconds)
        try:
            finding = find_cause(evidence)
            if finding is not None and (breach := self._breach_behind(finding.cause, bad)) is not None:
                self._follows(breach, finding.cause, evidence, bad)
                return
            opinion = self._known_before_fixes(evidence, finding) if finding is not None else None
            if opinion is not None:
                self._open_as(opinion, evidence, bad)
                return
            budget = Budget.for_step(max(step_seconds, forward_seconds), started, self.least_seconds)
            incident = explain(evidence, budget, self._rank, finding)
        except StopRun:
            raise
        except Exception as fault:
            self._on_fault(fault)
            incident = unexplained_incident(
                bad, f"explaining it failed: {type(fault).__name__}: {fault}"[:300], self._rank
            )
        self._open(incident, evidence, bad)

    def _breach_behind(self, cause: str, bad: BadResult) -> Case | None:
        """The broken protocol that this failure is a consequence of."""
        if is_only_the_scale(cause, bad):
            return self.past_scaler.noticed_before(bad, self.cases)
        return self.breach_behind(cause, bad)

    def _known_before_fixes(self, evidence: Evidence, finding: Finding) -> Incident | Case | None:
        """Of which story this failure is one more end, or the end; None where fixes are to be tried first."""
        story = self.story_of(finding.cause)
        if story is not None:
            return story
        if finding.cause not in self.ends_of_stories:
            return None
        return self.opinion_before_fixes(explain_at_once(evidence, finding, self._rank))

    def _is_lost_on_the_wire(self, bad: BadResult) -> bool:
        """Whether this rank's finite gradients were too large for the type in which they were sent: it is told then."""
        try:
            incident = overflow_on_the_wire(bad, Replayer(bad, self._recorder), self._rank)
        except Exception:  # a hook that cannot be run on gradients alone
            return False
        if incident is not None:
            self._open_unreplayed(incident, bad)
        return incident is not None

    def _await_weights(self, bad: BadResult, reason: str) -> None:
        """Other ranks hold parts of the weights: replay when all have been gathered, which the backward pass does."""
        incident = bad_input(bad, reason, self._rank)
        if incident is not None:
            self._open_unreplayed(incident, bad)
            return
        self._awaiting.add(bad, reason)

    def _settle(self, settled: list[Awaited]) -> None:
        """The wait for weights is over."""
        self._told_later = []
        try:
            for awaited in settled:
                self._settle_one(awaited)
        finally:
            found, self._told_later = self._told_later, None
        for incident in found:
            self._tell(incident)

    def _settle_one(self, awaited: Awaited) -> None:
        cases, unknown_since, paused = len(self.cases), self._poison.unknown_since, self._recorder.paused
        self._recorder.paused = True
        try:
            if awaited.weights.is_complete:
                with neutral_thread(), awaited.weights.in_place():
                    self._investigate(awaited.bad, time.perf_counter())
            else:
                self._arm(awaited.bad, awaited.reason)
        finally:
            self._recorder.paused = paused
            for case in self.cases[cases:]:
                case.updates = awaited.updates
            if unknown_since is None and self._poison.unknown_since is not None:
                self._poison.unknown_since = awaited.updates

    def _look_for_underflow(self, bad: BadResult) -> None:
        """A suspicion: told only if a replay in float32 proves it."""
        if self._proofs >= MAX_PROOFS or any(c.incident.cause == "gradient-underflow" for c in self.cases):
            return
        self._proofs += 1
        try:
            incident = prove_underflow(bad, Replayer(bad, self._recorder), self._rank)
        except Exception:  # it cannot be run again: a suspicion is told to nobody
            return
        if incident is not None:
            self.add(incident)

    def _located(self, bad: BadResult) -> Evidence | None:
        """Where the failure begins; with the present values where the old ones are gone, if it fails with those too."""
        budget = Budget.for_step(self._recorder.step_seconds, time.perf_counter(), self.least_seconds)
        try:
            return locate(bad, Replayer(bad, self._recorder), budget)
        except ChangedSinceError as changed:
            self._recorder.log.arguments.copies_large = True
            try:
                return locate(bad, Replayer(bad, self._recorder, as_it_is_now=True))
            except ReplayError:
                raise changed from None

    def close(self) -> None:
        """The run ends: what could not be run again and did not come back is reported as that."""
        self.past_scaler.close()
        self._awaiting.settle()
        for bad, reason in self._arming.unexplained:
            incident = with_advice(unexplained_incident(bad, reason, self._rank, self._arming.saw_bad_weights), bad)
            self.cases.append(Case(incident, ("", None, None, None), last_step=bad.step))
            self._tell(incident)
        self._arming.unexplained.clear()

    def tick(self, step: int) -> None:
        """An iteration ended."""
        self.past_scaler.tick(step)
        self._awaiting.settle_before(step)
        self._arming.tick(step)

    def _examine_trace(self, bad: BadResult, live: LiveTracing) -> None:
        evidence = locate_in_trace(bad, live.trace)
        if evidence is None:
            self._innocent(bad)
            return
        if not self._counted(bad, evidence):
            self._open(explain_trace(evidence, self._rank, live.reason), evidence, bad)
        caught = self._arming.caught(bad)
        if self.cases:
            self.cases[-1].occurrences += caught  # the failure that armed the tracing was this one

    def _counted(self, bad: BadResult, evidence: Evidence) -> bool:
        """Whether this failure began where an earlier one did."""
        place, calls = place_of(evidence), calls_behind(bad)
        for case in self.cases:
            if (bad.has_ended_run or bad.is_past_scaler) and case.incident.severity == "info":
                continue  # it was normal then
            if case.place == place and (case.incident.mode == bad.mode or bad.kind == "buffer"):
                self._came_back(case, bad, calls)
                self._further.led_to(bad, case)
                return True
        return False

    def _came_back(self, case: Case, bad: BadResult, calls: frozenset[int]) -> None:
        """A failure is one more of `case`, or another result of the same calls."""
        is_same = bad.kind == "buffer" or bool(case.calls & calls)
        case.calls = calls or case.calls
        self._skipped.note(bad, case)
        case.came_back(bad.step, 0 if is_same else 1)
        self._poison.note(bad, case.told_as)
        if case.part_of is None and self._told_later is None:
            self.came_back(msgspec.structs.replace(case.incident, step=bad.step))

    def _open(self, incident: Incident, evidence: Evidence, bad: BadResult) -> None:
        self._open_as(self.second_opinion(self._with_past(incident)), evidence, bad)

    def _open_as(self, opinion: Incident | Case, evidence: Evidence, bad: BadResult) -> None:
        if isinstance(opinion, Case):
            self._join(opinion, evidence, bad)
            return
        case = Case(opinion, place_of(evidence), self._recorder.attempts, last_step=bad.step, calls=calls_behind(bad))
        case.kind = bad.kind
        self.cases.append(case)
        self._skipped.note(bad, case)
        self._further.led_to(bad, case, is_new=True)
        if opinion.severity == "info":  # normal operation takes none of the investigations
            case.is_investigated = False
            self._looks -= 1
        self._poison.note(bad, case)
        if not self.past_scaler.is_kept_back(case, bad):
            self._tell(opinion)

    def _follows(self, breach: Case, cause: str, evidence: Evidence, bad: BadResult) -> None:
        """This failure is a consequence of a broken protocol that was told."""
        part = Case(breach.incident, place_of(evidence), self._recorder.attempts, is_investigated=False)
        part.calls, part.last_step = calls_behind(bad), bad.step
        self.cases.append(part)
        part.follows_from(breach, cause)
        self._further.led_to(bad, part, is_new=True)
        self._poison.note(bad, breach)

    def _join(self, story: Case, evidence: Evidence, bad: BadResult) -> None:
        """This failure is one more end of a story that was told."""
        part = Case(story.incident, place_of(evidence), self._recorder.attempts, is_investigated=False)
        part.calls = story.calls = calls_behind(bad)
        self.cases.append(part)
        self.merge(part, story)
        story.last_step = bad.step
        self._further.led_to(bad, story)
        self._poison.note(bad, story)

    def _with_past(self, incident: Incident) -> Incident:
        """A parameter or buffer that was bad before the step: since when, and what made it so."""
        if incident.cause != "nonfinite-parameter":
            return incident
        spoiled_by = self._poison.buffer(str(incident.evidence.get("name")))
        told = self._past.told(incident, spoiled_by, is_incomplete=bool(self._arming.unexplained))
        if self._past.changed_before(incident) is not None:
            self._arming.forget_gradients()
        return told

    def _count_as_known(self, bad: BadResult) -> None:
        """Investigations are used up: count it to the last incident of its mode, without looking."""
        case = next((c for c in reversed(self.cases) if c.incident.mode == bad.mode and c.is_investigated), None)
        if case is None:
            return
        if case is self._poison.case and case.consequences:
            case.consequences += 1
        else:
            case.occurrences += 1
        case.last_step = bad.step

    def _innocent(self, bad: BadResult) -> None:
        self._looks -= 1
        roots = [event for event in bad.record.events if isinstance(event, RootCall)]
        if bad.kind == "output" and roots:
            self._recorder.judge.mark_innocent(roots[-1].module)

    def _arm(self, bad: BadResult, reason: str) -> None:
        """The step cannot be replayed: watch the coming ones operator by operator."""
        incident = bad_input(bad, reason, self._rank)
        if incident is not None:
            self._open_unreplayed(incident, bad)
            return
        if bad.mode == "train" and self._poison.unknown_since is None:
            self._poison.unknown_since, self._poison.unknown_step = self._recorder.attempts, bad.step
        caught_live = [c for c in self.cases if c.incident.evidence.get("rung") == "live-trace"]
        known = next((c for c in reversed(caught_live) if c.incident.mode == bad.mode), None)
        if known is not None:  # its like was caught live before
            known.came_back(bad.step)
        else:
            self._arming.keep(bad, reason)
        self._arming.arm(bad, reason)

    def _open_unreplayed(self, incident: Incident, bad: BadResult) -> None:
        """A failure that explains itself without a replay."""
        place = (incident.cause, incident.module, None, None)
        known = next((case for case in self.cases if case.place == place), None)
        if known is not None:
            known.came_back(bad.step)
            return
        case = Case(incident, place, self._recorder.attempts, last_step=bad.step, calls=calls_behind(bad))
        case.kind = bad.kind
        self.cases.append(case)
        self._poison.note(bad, case)
        self._tell(incident)
