"""The incidents of a run: which failure is investigated, which is one that was seen before, which a consequence."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from ampguard import compat
from ampguard.capture.record import BadResult, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.diagnose.causes.gradient_underflow import prove_underflow
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.gradients import GradientEvidence, is_only_the_scale
from ampguard.diagnose.hooked import changed_by_a_hook
from ampguard.diagnose.investigate import Budget, explain, explain_trace, locate, locate_in_trace, unexplained_incident
from ampguard.diagnose.recurrence import calls_behind
from ampguard.diagnose.sharded import Awaited, bad_input, may_await, with_advice
from ampguard.diagnose.skipped import SkippedSteps
from ampguard.diagnose.wire_overflow import overflow_on_the_wire
from ampguard.errors import ChangedSinceError, DoesNotRepeatError, ReplayError, StopRun
from ampguard.incident import Incident
from ampguard.numerics import is_finite
from ampguard.replay.behind import updated_leaves
from ampguard.replay.live import LiveTracing
from ampguard.replay.rebuild import Replayer
from ampguard.replay.sandbox import neutral_thread

LOOKS_PER_INVESTIGATION = 4
"""How many further failures are located, to see whether they are new, for each full investigation allowed."""

ARMED_STEPS = 50
NOT_REPEATED = "run again, it has finite gradients: something changed them between backward and the optimizer's step"
MAX_PROOFS = 3
"""Suspicions of gradient-underflow that are followed."""

Place = tuple[str, str | None, str | None, int | None]


@dataclass(slots=True)
class Case:
    """One incident of the run, and how often it came back."""

    incident: Incident
    place: Place
    updates: int = 0
    occurrences: int = 1
    consequences: int = 0
    last_step: int = 0
    is_investigated: bool = True
    """False for what needed no replay: it takes none of the investigations that are allowed."""
    calls: frozenset[int] = frozenset()
    """The calls of the model that its last bad result was made from: another result of theirs is no new occurrence."""
    part_of: Case | None = None
    """The case of the longer story that this failure belongs to: it is told there."""

    def result(self) -> Incident:
        evidence = dict(self.incident.evidence)
        if self.occurrences > 1:
            evidence["last_step"] = self.last_step
        if self.consequences:
            evidence["later_failures_caused_by_it"] = self.consequences
        return msgspec.structs.replace(self.incident, occurrences=self.occurrences, evidence=evidence)


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
        self._unreplayable: list[tuple[BadResult, str]] = []
        self._recorder = recorder
        self._max_incidents = max_incidents
        self._rank = rank
        self._on_new = on_new
        self._on_fault = on_fault
        self._looks = 0
        self._skipped = SkippedSteps()
        self._skipped_for: Case | None = None
        """What the last skipped step that was looked at was skipped for."""
        self._proofs = 0
        self._changed_gradients: list[BadResult] = []
        """Bad gradients of steps that have finite ones when they are run again."""
        self._poisoned_by: Case | None = None
        self._poisoned_buffers: dict[str, Case] = {}
        self._unknown_since: int | None = None
        """Updates made when the first loss was bad that could not be replayed: bad parameters are its doing."""
        self._armed_until: int | None = None
        self._awaited: list[Awaited] = []
        """Bad results whose weights are spread over ranks, and yet to be gathered."""
        self._told_later: list[Incident] | None = None
        """What is found out while models are not as the script has made them: whoever hears of it may change them."""
        self.weights_bad_since: int | None = None
        """The first step in which a look at the weights found some that were not finite."""
        self.second_opinion: Callable[[Incident], Incident | Case] = lambda incident: incident
        """Asked about each new failure by those who know the run's history: is it the end of a longer story, or (a case)
        of one that has been told?"""

    def add(self, incident: Incident, poisons: bool = False) -> Case:
        """Take in an incident that needed no replay: a broken protocol, a course over many steps.

        `poisons`: an optimizer has just made its parameters non-finite; what fails from now on is its doing.
        """
        case = Case(
            incident, ("", None, None, None), self._recorder.attempts, last_step=incident.step, is_investigated=False
        )
        self.cases.append(case)
        if poisons and self._poisoned_by is None:
            case.updates -= 1  # the update that did it may have been counted already
            self._poisoned_by = case
        self._tell(incident)
        return case

    def _tell(self, incident: Incident) -> None:
        """Tell of a new incident. What prints the first card imports libraries, and one of them draws from `random`."""
        if self._told_later is not None:
            self._told_later.append(incident)
            return
        with neutral_thread():
            self._on_new(incident)

    def trained(self) -> list[torch.Tensor]:
        """What the optimizers that have stepped hold and move: frozen parameters are left out."""
        held = [(o, p) for o in self._recorder.stepped_since(0) for group in o.param_groups for p in group["params"]]
        return [p for optimizer, p in held if p.requires_grad or p in optimizer.state]

    def retell(self, case: Case, incident: Incident) -> None:
        """The same failure, better understood: the case goes on under another cause."""
        case.incident = incident
        self._tell(incident)

    def merge(self, case: Case, story: Case) -> None:
        """This case is a part of a longer story: it is no incident of its own any more."""
        case.part_of = story
        story.occurrences += case.occurrences

    def incidents(self) -> tuple[Incident, ...]:
        """The incidents so far, the most important first."""
        order = {"error": 0, "warning": 1, "info": 2}
        found = [case.result() for case in self.cases if case.part_of is None]
        return tuple(sorted(found, key=lambda i: (order[i.severity], i.step)))

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
        if any(a.weights.is_complete or a.updates != self._recorder.attempts for a in self._awaited):
            self._settle_awaited()
        if self.is_used_up:
            return
        if self._is_consequence(bad) or self._is_known_skip(bad):
            return
        self._looks += 1
        live = self._recorder.live
        if isinstance(live, LiveTracing) and live.trace.ops:
            self._examine_trace(bad, live)
            return
        self._investigate(bad, started)

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
                self._changed_gradients.append(bad)
                if not compat.several_ranks():  # else another rank's gradients are to blame, and it says so
                    self._unreplayable.append((bad, NOT_REPEATED))
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
        budget = Budget.for_step(max(self._recorder.step_seconds, forward_seconds), started)
        try:
            incident = explain(evidence, budget, self._rank)
        except StopRun:
            raise
        except Exception as fault:
            self._on_fault(fault)
            incident = unexplained_incident(
                bad, f"explaining it failed: {type(fault).__name__}: {fault}"[:300], self._rank
            )
        self._open(incident, evidence, bad)

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
        settle = lambda: self._recorder.barrier.call(self._settle_awaited, False)  # noqa: E731
        self._awaited.append(Awaited(bad, reason, self._recorder.attempts, settle))
        if self._awaited[-1].weights.problem is not None:
            self._settle_awaited()

    def _settle_awaited(self, is_last: bool = True) -> None:
        """Weights have been gathered, or are about to change. `is_last`: what is missing now is not waited for."""
        if not is_last and any(awaited.may_go_on for awaited in self._awaited):
            return
        settled, self._awaited = self._awaited, []
        self._told_later = []
        for awaited in reversed(settled):
            awaited.end()
        try:
            for awaited in settled:
                self._settle(awaited)
        finally:
            found, self._told_later = self._told_later, None
        for incident in found:
            self._tell(incident)

    def _settle(self, awaited: Awaited) -> None:
        cases, unknown_since, paused = len(self.cases), self._unknown_since, self._recorder.paused
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
            if unknown_since is None and self._unknown_since is not None:
                self._unknown_since = awaited.updates

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

    def _is_known_skip(self, bad: BadResult) -> bool:
        """Whether the scaler skipped this step as it skipped others before: only because of the loss scale."""
        if bad.loss_scale is None or not bad.is_held_off:
            return False
        case = next((c for c in self.cases if c.incident.cause == "loss-scale-overflow"), None)
        if case is None:
            return False
        if self._skipped.may_look():
            started = time.perf_counter()
            try:
                if not is_only_the_scale(bad, Replayer(bad, self._recorder)):
                    return False
                self._skipped_for = case
            except Exception:  # it cannot be run again: take it for one of the many
                pass
            finally:
                self._skipped.looked(time.perf_counter() - started)
        case = self._skipped_for or case  # what is not looked at is most likely what the last one was
        case = case.part_of or case
        case.occurrences += 1
        case.last_step = bad.step
        return True

    def _located(self, bad: BadResult) -> Evidence | None:
        """Where the failure begins; with the present values where the old ones are gone, if it fails with those too."""
        budget = Budget.for_step(self._recorder.step_seconds, time.perf_counter())
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
        if self._awaited:
            self._settle_awaited()
        for bad, reason in self._unreplayable:
            incident = with_advice(unexplained_incident(bad, reason, self._rank), bad)
            self.cases.append(Case(incident, ("", None, None, None), last_step=bad.step))
            self._tell(incident)
        self._unreplayable.clear()

    def tick(self, step: int) -> None:
        """An iteration ended."""
        if self._awaited:
            self._settle_awaited(is_last=any(step > awaited.bad.step + 1 for awaited in self._awaited))
        if self._armed_until is not None and step > self._armed_until:
            self._disarm()

    def _examine_trace(self, bad: BadResult, live: LiveTracing) -> None:
        evidence = locate_in_trace(bad, live.trace)
        if evidence is None:
            self._innocent(bad)
            return
        if not self._counted(bad, evidence):
            self._open(explain_trace(evidence, self._rank, live.reason), evidence, bad)
        caught = [b for b, _ in self._unreplayable if b.mode == bad.mode]
        if self.cases:
            self.cases[-1].occurrences += len(caught)  # the failure that armed the tracing was this one
        self._unreplayable = [(b, why) for b, why in self._unreplayable if b.mode != bad.mode]
        self._disarm()

    def _counted(self, bad: BadResult, evidence: Evidence) -> bool:
        """Whether this failure began where an earlier one did."""
        place, calls = place_of(evidence), calls_behind(bad)
        for case in self.cases:
            if case.place == place and (case.incident.mode == bad.mode or bad.kind == "buffer"):
                is_same = bad.kind == "buffer" or bool(case.calls & calls)
                case.calls = calls or case.calls
                self._skipped_for = case if bad.is_held_off else self._skipped_for
                case = case.part_of or case
                case.occurrences += not is_same
                case.last_step = bad.step
                self._note_poisoner(bad, case)
                self._note_poison(bad, case)
                return True
        return False

    def _open(self, incident: Incident, evidence: Evidence, bad: BadResult) -> None:
        opinion = self.second_opinion(self._with_history(incident))
        if isinstance(opinion, Case):
            part = Case(opinion.incident, place_of(evidence), self._recorder.attempts, is_investigated=False)
            part.calls = calls_behind(bad)
            self.cases.append(part)
            self.merge(part, opinion)
            opinion.last_step = bad.step
            self._note_poison(bad, opinion)
            return
        incident = opinion
        case = Case(incident, place_of(evidence), self._recorder.attempts, last_step=bad.step, calls=calls_behind(bad))
        self.cases.append(case)
        self._skipped_for = case if bad.is_held_off else self._skipped_for
        if incident.severity == "info":  # normal operation takes none of the investigations
            case.is_investigated = False
            self._looks -= 1
        self._note_poisoner(bad, case)
        self._note_poison(bad, case)
        self._tell(incident)

    def _note_poisoner(self, bad: BadResult, case: Case) -> None:
        """Whether the update that follows makes the weights themselves bad: what fails from then on is its doing."""
        poisons = (bad.kind == "loss" and case.incident.severity != "info") or (
            bad.kind == "gradient" and not bad.is_held_off
        )
        if bad.mode != "train" or not poisons or self._poisoned_by is not None:
            return
        case.updates = self._recorder.attempts
        if bad.kind == "gradient":  # the update follows at once, whoever makes it
            case.updates -= 1
        self._poisoned_by = case

    def _with_history(self, incident: Incident) -> Incident:
        """A parameter or buffer that was bad before the step: since when, and what poisoned it."""
        if incident.cause != "nonfinite-parameter":
            return incident
        changed = next((b for b in self._changed_gradients if b.step < incident.step), None)
        facts = dict(incident.evidence)
        buffer = f".{facts.get('name')}"  # (it may have the name of what its module hangs in before it)
        case = next((c for name, c in self._poisoned_buffers.items() if buffer.endswith(f".{name}")), None)
        text = incident.explanation
        if case is not None:
            first = case.incident
            at = f"{first.location.file}:{first.location.line}" if first.location else "an unknown line"
            facts["since_step"] = first.step
            facts["poisoned_by"] = {"step": first.step, "cause": first.cause, "op": first.op, "line": at}
            text += f" It was poisoned in step {first.step} by {first.op} at {at} ({first.cause})."
        elif facts.get("role") == "buffer" and facts.get("times_written") == 0:
            facts["since_step"] = None
            text += (
                " PyTorch has counted no write to it since it was made: its construction, a checkpoint or an assignment gave it "
                "these values (or a write through `.data`)."
            )
        elif (reason := self._was_bad_before_it_was_used(facts)) is not None:
            facts["since_step"] = None
            text += f" {reason} The steps before this one did not use it: initialisation or a checkpoint."
        elif self._recorder.judge.last_good_step is not None:
            facts["since_step"] = self._recorder.judge.last_good_step
            if changed is not None or self._unreplayable or not self._recorder.stepped_since(0):
                facts["gradients_were_looked_at"] = False  # (without an optimizer nobody does)
            text += f" The loss of step {self._recorder.judge.last_good_step} was still finite: {_since(facts)}."
            kept = tuple(fix for fix in incident.fixes if fix.action != "initialise-parameter")  # it began well
            incident = msgspec.structs.replace(incident, fixes=kept)
        else:
            facts["since_step"] = None
            text += " It was so before the first step: initialisation or a checkpoint."
        if changed is not None:
            facts["gradients_changed_in_step"] = changed.step
            text += (
                f" The gradients that the optimizer used in step {changed.step} were not finite, and those of the same step run "
                f"again are: something changed them between backward and the optimizer's step (a hook, the script, another rank)."
            )
            self._unreplayable = [(b, why) for b, why in self._unreplayable if b.kind != "gradient"]
        return msgspec.structs.replace(incident, explanation=text, evidence=facts)

    def _was_bad_before_it_was_used(self, facts: dict[str, Any]) -> str | None:
        """What shows that a parameter was bad while the losses were still finite; None where nothing does."""
        last_good, seen = self._recorder.judge.last_good_step, self.weights_bad_since
        if seen is not None and last_good is not None and seen < last_good:
            return f"The weights were not finite already in step {seen}, when they were looked at."
        written = facts.get("times_written")
        if facts.get("is_trained") and written is not None and written < len(self._recorder.stepped_since(0)):
            return f"It was written to {written} times since it was made, less often than the optimizers have stepped."
        return None

    def _note_poison(self, bad: BadResult, case: Case) -> None:
        for name in bad.names:
            self._poisoned_buffers.setdefault(name, case)

    def _is_consequence(self, bad: BadResult) -> bool:
        """Whether an earlier bad update has made the parameters themselves bad: everything after is its doing."""
        case = self._poisoned_by
        updates = case.updates if case is not None else self._unknown_since
        if updates is None or bad.kind == "raised":
            return False
        is_later = case is not None and bad.step > case.incident.step  # (a script may update its weights by itself)
        if self._recorder.attempts <= updates and not is_later:
            return False
        if case is None:
            return self._reads_bad_parameters(bad, updates)
        is_asked = case.consequences % 16 == 0  # parameters that went bad stay so, unless a checkpoint is loaded
        if is_asked and not self._reads_bad_parameters(bad, updates):
            return False
        case.consequences += 1
        case.last_step = bad.step
        return True

    def _reads_bad_parameters(self, bad: BadResult, updates: int) -> bool:
        """Whether a parameter is not finite: of the modules that were called, or of an optimizer that stepped since."""
        if any(has_bad_parameters(e.module) for e in bad.record.events if isinstance(e, RootCall)):
            return True
        if any(not is_finite(leaf.detach()) for leaf in updated_leaves(bad.record).values()):
            return True
        groups = [group for o in self._recorder.stepped_since(updates) for group in o.param_groups]
        return any(not is_finite(p.detach()) for group in groups for p in group["params"])

    def _count_as_known(self, bad: BadResult) -> None:
        """Investigations are used up: count it to the last incident of its mode, without looking."""
        case = next((c for c in reversed(self.cases) if c.incident.mode == bad.mode and c.is_investigated), None)
        if case is None:
            return
        if case is self._poisoned_by and case.consequences:
            case.consequences += 1
        else:
            case.occurrences += 1
        case.last_step = bad.step

    def _innocent(self, bad: BadResult) -> None:
        self._looks -= 1
        if bad.kind == "output":
            for event in bad.record.events:
                if isinstance(event, RootCall) and event.index == max(roots_indices(bad)):
                    self._recorder.judge.mark_innocent(event.module)

    def _arm(self, bad: BadResult, reason: str) -> None:
        """The step cannot be replayed: watch the coming ones operator by operator."""
        incident = bad_input(bad, reason, self._rank)
        if incident is not None:
            self._open_unreplayed(incident, bad)
            return
        if bad.mode == "train" and self._unknown_since is None:
            self._unknown_since = self._recorder.attempts
        caught_live = [c for c in self.cases if c.incident.evidence.get("rung") == "live-trace"]
        known = next((c for c in reversed(caught_live) if c.incident.mode == bad.mode), None)
        if known is not None:  # its like was caught live before
            known.occurrences += 1
            known.last_step = bad.step
        elif not any(earlier.mode == bad.mode for earlier, _ in self._unreplayable):
            self._unreplayable.append((bad, reason))
        self._armed_until = bad.step + ARMED_STEPS
        self._recorder.live = LiveTracing(
            reason, [e.module for e in bad.record.events if isinstance(e, RootCall)], self._recorder.barrier
        )

    def _open_unreplayed(self, incident: Incident, bad: BadResult) -> None:
        """A failure that explains itself without a replay."""
        place = (incident.cause, incident.module, None, None)
        known = next((case for case in self.cases if case.place == place), None)
        if known is not None:
            known.occurrences += 1
            known.last_step = bad.step
            return
        case = Case(incident, place, self._recorder.attempts, last_step=bad.step, calls=calls_behind(bad))
        self.cases.append(case)
        if bad.mode == "train" and not bad.is_held_off and self._poisoned_by is None:
            self._poisoned_by = case
        self._tell(incident)

    def _disarm(self) -> None:
        self._armed_until = None
        self._recorder.live = None


def _since(facts: dict[str, Any]) -> str:
    """What has made a parameter or buffer bad that was not when training began."""
    if not facts.get("is_trained", True):
        return "it was written to since"
    if not facts.get("gradients_were_looked_at"):
        return "the update after it poisoned it"
    return (
        "the update after it poisoned it, and the gradients of that update were finite. So the optimizer's own arithmetic did "
        "(a division by 0 in its state, a step far too large, a learning rate that is not a number), or a write of the "
        "script's to the parameter"
    )


def place_of(evidence: Evidence) -> Place:
    line = evidence.op.line
    file = line.code.co_filename if line is not None else None
    name = evidence.op.name
    if isinstance(evidence, GradientEvidence) and evidence.is_only_the_scale:
        name += " at this loss scale"
    return name, evidence.op.module, file, line.number if line is not None else None


def roots_indices(bad: BadResult) -> list[int]:
    return [e.index for e in bad.record.events if isinstance(e, RootCall)] or [-1]


def has_bad_parameters(module: nn.Module) -> bool:
    """Whether any parameter is not finite."""
    with torch.no_grad():
        return any(not is_finite(p) for p in module.parameters())
