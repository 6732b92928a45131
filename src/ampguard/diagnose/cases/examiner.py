"""What becomes of a bad result: it is run again, explained, and handed to the casebook; or known, or no failure at all."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable

from ampguard import compat
from ampguard.capture.glue.schedule import FIRST_STEPS
from ampguard.capture.record import BadResult, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.diagnose.budget import LEAST_SECONDS, LEAST_SECONDS_OF_HEALING, Budget
from ampguard.diagnose.cases.arming import Arming
from ampguard.diagnose.cases.awaiting import Awaited, Awaiting
from ampguard.diagnose.cases.case import Case, place_of
from ampguard.diagnose.cases.casebook import Casebook
from ampguard.diagnose.cases.handed_on import tell_handed_on
from ampguard.diagnose.cases.hooked import changed_by_a_hook
from ampguard.diagnose.cases.past_scaler import is_only_the_scale
from ampguard.diagnose.cases.recurrence import calls_behind
from ampguard.diagnose.cases.replaced import with_replaced
from ampguard.diagnose.cases.sharded import bad_input, may_await, with_advice
from ampguard.diagnose.cases.unrecorded import Unrecorded, better
from ampguard.diagnose.cases.wire_overflow import overflow_on_the_wire
from ampguard.diagnose.cases.withheld import GIVEN, OF_PRECISION, Withheld, is_of_module
from ampguard.diagnose.causes.gradient_underflow import begun_before, most_proofs, prove_underflow
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, find_cause
from ampguard.diagnose.givens.computed_again import told
from ampguard.diagnose.investigate import (
    explain,
    explain_at_once,
    explain_trace,
    incident_of,
    unexplained_incident,
)
from ampguard.diagnose.locate.cut_off import cut_off_derivative
from ampguard.diagnose.locate.finding_place import FindingPlace
from ampguard.diagnose.locate.locating import NOT_MADE, locate_in_trace
from ampguard.errors import DoesNotRepeatError, ReplayError, StopRun
from ampguard.incident import Incident
from ampguard.replay.live import LiveTracing
from ampguard.replay.rebuild import Replayer
from ampguard.replay.sandbox import neutral_thread

LOOKS_PER_INVESTIGATION = 4
"""How many further failures are located, to see whether they are new, for each full investigation allowed."""

FORWARDS_PER_STEP = 4
"""How many forward passes a step takes at most, where no other step has shown it: a backward pass is about two."""

NOT_REPEATED = "run again, it has finite gradients: something changed them between backward and the optimizer's step"

MEANT_AT_TIMES = frozenset({"division-by-zero", "empty-reduction", "indeterminate", "nonfinite-input", "unexplained"})
"""Causes of a figure that is NaN on purpose: of no samples, or of targets that are not known."""


class Examiner:
    """Examines bad results one by one, within limits that keep a run that fails at every step going."""

    def __init__(
        self,
        recorder: FlightRecorder,
        casebook: Casebook,
        max_incidents: int,
        rank: int,
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._recorder = recorder
        self._casebook = casebook
        self._max_incidents = max_incidents
        self._rank = rank
        self._on_fault = on_fault
        self.least_seconds = LEAST_SECONDS
        """What an investigation may take, however quick the step is."""
        self.holds_off = False
        """Whether updates with bad gradients are held off, by us or by an engine."""
        self._looks = 0
        self._proofs = 0
        self._finding_place = FindingPlace(recorder)
        self._arming = Arming(recorder)
        self._unrecorded = Unrecorded(recorder)
        self._awaiting = Awaiting(recorder, self._settle)

    @property
    def is_used_up(self) -> bool:
        """Whether every investigation that was allowed has been made."""
        investigated = sum(case.is_investigated for case in self._casebook.cases)
        return investigated >= self._max_incidents or self._looks >= LOOKS_PER_INVESTIGATION * self._max_incidents

    def examine(self, bad: BadResult) -> None:
        """Find out what a bad result is: new, known, a consequence, or no failure at all."""
        if bad.is_of_state:
            with neutral_thread():
                self._look_at_state(bad)
            return
        if self._recorder.counting:
            self._casebook.count_unseen(bad)
            return
        with neutral_thread():
            if bad.kind == "underflow":
                self._look_for_underflow(bad)
                return
            if bad.is_suspected:
                self._look_for_replaced(bad)
                return
            if bad.may_be_meant:
                self._look_at_figure(bad)
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
        if self._casebook.poison.explains(bad):
            if self._casebook.poison.case is None:
                self._arming.weights_are_bad()
                self._unrecorded.end()
            return
        if self._casebook.skipped.is_known(bad, self._casebook.cases):
            return
        live = self._arming.live
        is_wanted = live is not None or self._unrecorded.shows_more(bad)
        if not is_wanted and (self._goes_on(bad) or self._is_like_a_known_one(bad)):
            return
        self._looks += 1
        self._casebook.further.begin(bad)
        try:
            if live is not None:
                self._examine_trace(bad, live)
            else:
                self._investigate(bad, started)
        finally:
            self._casebook.further.end()

    def _goes_on(self, bad: BadResult) -> bool:
        """Whether a failure hands on what was told. Not where fixes are applied: what was bad then may be no more."""
        return self.least_seconds < LEAST_SECONDS_OF_HEALING and self._casebook.goes_on(bad)

    def _is_like_a_known_one(self, bad: BadResult) -> bool:
        """Whether a failure is counted to one that was told, without seeing where it begins."""
        step_seconds = self._recorder.step_seconds
        case = self._casebook.further.case_of(
            bad, lambda: self._casebook.story_of(None), step_seconds, self.least_seconds
        )
        if case is not None:
            self._casebook.count(case, bad, calls_behind(bad))
        return case is not None

    def _investigate(self, bad: BadResult, started: float) -> None:
        """Run it again, and say what is seen."""
        try:
            evidence = self._finding_place.of(bad, self.least_seconds)
        except DoesNotRepeatError:
            if compat.several_ranks() and self._is_lost_on_the_wire(bad):
                return
            hooked = changed_by_a_hook(bad, self._rank) if bad.error is None else None
            if hooked is not None:
                self._casebook.open_unreplayed(hooked, bad)
            elif bad.error is not None:  # anomaly detection raises for what reaches no parameter, too
                self._tell_cut_off(bad)
            elif not bad.is_held_off:
                self._casebook.past.changed_gradients.append(bad)
                if not compat.several_ranks():  # else another rank's gradients are to blame, and it says so
                    self._arming.unexplained.append((bad, NOT_REPEATED))
            return
        except ReplayError as why:
            if may_await(bad, self.holds_off):
                self._await_weights(bad, str(why))
            else:
                self._cannot_replay(bad, str(why))
            return
        except Exception as why:  # the module itself raised in its second run, or memory ran out
            self._arm(bad, f"{type(why).__name__}: {why}"[:300])
            return
        if evidence is None:
            self._innocent(bad)
            return
        if self._tell_withheld(self._casebook.kept_state.withheld.take_at(place_of(evidence), bad.step), bad):
            return
        if self._casebook.told_before(bad, place_of(evidence)):
            return
        forward_seconds = sum(e.seconds for e in evidence.events() if isinstance(e, RootCall))
        step_seconds = self._recorder.step_seconds
        if forward_seconds and self._recorder.steps.count <= FIRST_STEPS:  # which also load libraries and warm up
            step_seconds = min(step_seconds, FORWARDS_PER_STEP * forward_seconds)
        try:
            finding = find_cause(evidence)
            if finding is not None and self._is_consequence(finding, bad, evidence):
                return
            if finding is not None and self._is_told_as_state(finding, bad, evidence):
                return
            if finding is not None and self._casebook.told_as_mended(finding.cause, bad, evidence.op.place):
                return
            if finding is not None and (breach := self._breach_behind(finding.cause, bad)) is not None:
                self._casebook.follows(breach, finding.cause, bad, place_of(evidence))
                return
            opinion = self._known_before_fixes(evidence, finding) if finding is not None else None
            if opinion is not None:
                first = self._unrecorded.take_unexplained(bad, self._arming.unexplained)
                if first is not None and isinstance(opinion, Incident):
                    opinion = better(opinion, first.step)
                self._open_as(opinion, evidence, bad, first)
                return
            budget = Budget.for_step(max(step_seconds, forward_seconds), started, self.least_seconds)
            incident = explain(evidence, budget, self._rank, finding)
            if self._finding_place.was_computed_again(evidence):
                incident = told(incident)
            if bad.is_replaced and (bad.loss_scale is None or bad.is_own_scale):
                incident = with_replaced(incident)
        except StopRun:
            raise
        except Exception as fault:
            self._on_fault(fault)
            incident = unexplained_incident(
                bad, f"explaining it failed: {type(fault).__name__}: {fault}"[:300], self._rank
            )
        if not self._casebook.told_alike(incident, bad):
            self._open(incident, evidence, bad)

    def _is_told_as_state(self, finding: Finding, bad: BadResult, evidence: Evidence) -> bool:
        """Whether what made this was told as the script wrote it to a buffer, from which it was read now."""
        return "written_to" in finding.evidence and self._casebook.told_before(bad, place_of(evidence, finding.op))

    def _look_at_state(self, bad: BadResult) -> None:
        """State of the script's own has gone bad: why is found out now, and told once something has read it (an operator that
        raised may have been the first)."""
        states = self._casebook.kept_state.withheld
        if bad.error is not None:
            self._tell_withheld(states.take_refused(bad), bad)
            return
        if (
            self.is_used_up
            or self._recorder.counting
            or self._casebook.poison.case is not None
            or not states.may_look()
        ):
            return
        started = time.perf_counter()
        try:
            evidence = self._finding_place.of(bad, self.least_seconds)
        except Exception:  # it cannot be run again: whoever reads the state is told of
            return
        finding = find_cause(evidence) if evidence is not None else None
        if evidence is None or finding is None:
            return
        if finding.cause in GIVEN:
            states.is_made_of(evidence.given_by_script, bad)
            return
        place = place_of(evidence)
        budget = Budget.for_step(self._recorder.step_seconds, started, self.least_seconds)
        withheld = Withheld.of(explain(evidence, budget, self._rank, finding), evidence, place)
        if finding.cause in OF_PRECISION and is_of_module(bad):
            self._open(withheld.incident, evidence, bad)
            states.note_told(withheld, self._casebook.cases[-1])
            return
        known = next((case for case in self._casebook.cases if case.place == place), None)
        if known is not None:
            states.note_told(withheld, known)
        else:
            states.add(withheld)

    def _tell_withheld(self, withheld: Withheld | None, bad: BadResult) -> bool:
        """What was found out when state was spoiled is told, now that `bad` has read it."""
        if withheld is None:
            return False
        self._open(withheld.told_of(bad), withheld.evidence, withheld.evidence.bad)
        case = self._casebook.cases[-1]
        case.is_of_state = True
        self._casebook.kept_state.withheld.note_told(withheld, case)
        case.consequences += 1
        case.last_step = bad.step
        self._casebook.poison.note(bad, case)
        return True

    def _is_consequence(self, finding: Finding, bad: BadResult, evidence: Evidence) -> bool:
        """Whether the step was only given what a failure that was told has left behind; it is counted to that then."""
        book, cause = self._casebook, finding.cause
        if self._tell_withheld(book.kept_state.withheld.take_read(cause, evidence.given_by_script, bad), bad):
            return True
        spoiled_by = book.kept_state.explains(cause, bad, evidence)
        if spoiled_by is not None:
            book.poison.note(bad, spoiled_by)
            return True
        if book.hands_on(cause, bad, evidence.op.event):
            return True
        left_by = book.left_inside.explains(cause, bad, evidence)
        if left_by is not None and not book.kept_state.is_of_a_batch(evidence.given_tensor):
            book.count(left_by, bad, frozenset())
            return True
        is_of_buffer = finding.cause == "nonfinite-parameter" and finding.evidence.get("role") == "buffer"
        return is_of_buffer and self._casebook.poison.explains_buffer(str(finding.evidence.get("name")), bad)

    def _tell_cut_off(self, bad: BadResult) -> None:
        with contextlib.suppress(Exception):  # then nothing is known of it but what PyTorch has said
            told_of = cut_off_derivative(bad, Replayer(bad, self._recorder), self._rank)
            if told_of is not None and not self._casebook.told_before(bad, place_of(told_of[1])):
                self._open(*told_of, bad)

    def _breach_behind(self, cause: str, bad: BadResult) -> Case | None:
        """The broken protocol that this failure is a consequence of."""
        if is_only_the_scale(cause, bad):
            return self._casebook.past_scaler.noticed_before(bad, self._casebook.cases)
        return self._casebook.breach_behind(cause, bad)

    def _known_before_fixes(self, evidence: Evidence, finding: Finding) -> Incident | Case | None:
        """Of which story this failure is one more end, or the end; None where fixes are to be tried first."""
        story = self._casebook.story_of(finding.cause)
        if story is not None:
            return story
        if finding.cause not in self._casebook.ends_of_stories:
            return None
        return self._casebook.opinion_before_fixes(explain_at_once(evidence, finding, self._rank))

    def _is_lost_on_the_wire(self, bad: BadResult) -> bool:
        """Whether this rank's finite gradients were too large for the type in which they were sent: it is told then."""
        try:
            incident = overflow_on_the_wire(bad, Replayer(bad, self._recorder), self._rank)
        except Exception:  # a hook that cannot be run on gradients alone
            return False
        if incident is not None:
            self._casebook.open_unreplayed(incident, bad)
        return incident is not None

    def _was_given_bad(self, bad: BadResult, reason: str) -> bool:
        """Whether bad data are the cause, which can be told without a replay: it is then."""
        incident = bad_input(bad, reason, self._rank)
        if incident is not None:
            self._casebook.open_unreplayed(incident, bad)
        return incident is not None

    def _await_weights(self, bad: BadResult, reason: str) -> None:
        """Other ranks hold parts of the weights: replay when all have been gathered, which the backward pass does."""
        if self._was_given_bad(bad, reason):
            return
        self._awaiting.add(bad, reason)

    def _settle(self, settled: list[Awaited]) -> None:
        """The wait for weights is over."""
        with self._casebook.telling_later():
            for awaited in settled:
                self._settle_one(awaited)

    def _settle_one(self, awaited: Awaited) -> None:
        poison, paused = self._casebook.poison, self._recorder.paused
        cases, unknown_since = len(self._casebook.cases), poison.unknown_since
        self._recorder.paused = True
        try:
            if awaited.weights.is_complete:
                with neutral_thread(), awaited.weights.in_place():
                    self._investigate(awaited.bad_as_a_whole, time.perf_counter())
            else:
                self._cannot_replay(awaited.bad, awaited.reason)
        finally:
            self._recorder.paused = paused
            for case in self._casebook.cases[cases:]:
                case.updates = awaited.updates
            if unknown_since is None and poison.unknown_since is not None:
                poison.unknown_since = awaited.updates

    def _look_for_underflow(self, bad: BadResult) -> None:
        """A suspicion: told only if a replay in float32 proves it."""
        if self._proofs >= most_proofs(bad.step) or any(
            c.incident.cause == "gradient-underflow" or "lost_gradients" in c.incident.evidence
            for c in self._casebook.cases
        ):
            return
        self._proofs += 1
        try:
            largest_loss = self._casebook.largest_loss()
            incident = prove_underflow(bad, Replayer(bad, self._recorder), self._rank, largest_loss)
        except Exception:  # it cannot be run again: a suspicion is told to nobody
            return
        if incident is not None and incident.cause != "gradient-underflow":
            self._casebook.add(incident)
        elif incident is not None:
            self._casebook.add_underflow(begun_before(incident, self._casebook.faint_since()))

    def _look_for_replaced(self, bad: BadResult) -> None:
        """A suspicion: told only if a replay gives bad gradients in place of those that are about to be used."""
        if self.is_used_up or self._casebook.poison.case is not None or self._arming.live is not None:
            return
        self._looks += 1
        try:
            found = self._finding_place.of(bad, self.least_seconds)
        except Exception:  # they are finite, or it cannot be run again
            return
        if found is not None:
            self._examine(dataclasses.replace(bad, is_suspected=False))

    def _look_at_figure(self, bad: BadResult) -> None:
        """A figure that may well be NaN: it is told if its cause is a failure, and a precision of 0 / 0 as a note; so is what
        the script has computed again."""
        if self.is_used_up or self._casebook.poison.explains(bad) or self._goes_on(bad):
            return
        self._looks += 1
        try:
            evidence = self._finding_place.of(bad, self.least_seconds)
        except Exception:  # it cannot be run again
            if bad.may_be_meant == "errors":
                self._examine(dataclasses.replace(bad, may_be_meant=""))
            return
        finding = find_cause(evidence) if evidence is not None else None
        if evidence is None or finding is None or self._casebook.told_before(bad, place_of(evidence)):
            return
        if bad.may_be_meant == "again":
            text = f"{finding.explanation} The script has found that out, and computed it again: that was finite."
            again = dataclasses.replace(finding, explanation=text, severity="info")
            self._open(incident_of(evidence, again, (), self._rank, rung="replay"), evidence, bad)
        elif finding.cause not in MEANT_AT_TIMES or (bad.may_be_meant == "errors" and not _is_of_targets(finding)):
            self._investigate(dataclasses.replace(bad, may_be_meant=""), time.perf_counter())
        elif bad.may_be_meant == "count":
            note = dataclasses.replace(finding, severity="info")
            self._open(incident_of(evidence, note, (), self._rank, rung="replay"), evidence, bad)

    def close(self) -> None:
        """The run ends: what could not be run again and did not come back is reported as that."""
        for incident in self._casebook.kept_state.withheld.take_unread():
            self._casebook.add(incident)
        self._casebook.past_scaler.close()
        self._awaiting.settle()
        for bad, reason in self._arming.unexplained:
            if reason == NOT_MADE and tell_handed_on(bad, self._casebook, self._rank):
                continue
            known = self._casebook.skipped.explains(bad, self._casebook.cases)
            if known is not None:
                known.came_back(bad.step)
                continue
            incident = with_advice(unexplained_incident(bad, reason, self._rank, self._arming.saw_bad_weights), bad)
            opinion = self._casebook.second_opinion(incident)  # the history may tell what no replay could
            if isinstance(opinion, Case):
                self._casebook.count(opinion, bad, calls_behind(bad))
            else:
                self._casebook.open_unexplained(opinion, bad)
        self._arming.unexplained.clear()

    def tick(self, step: int) -> None:
        """An iteration ended."""
        if self._casebook.past_scaler.untold is not None:
            self._casebook.past_scaler.tick(step)
        if self._awaiting.waiting:
            self._awaiting.settle_before(step)
        if self._arming.until is not None:
            self._arming.tick(step)

    def _examine_trace(self, bad: BadResult, live: LiveTracing) -> None:
        evidence = locate_in_trace(bad, live.trace)
        if evidence is None:
            self._innocent(bad)
            return
        if not self._casebook.told_before(bad, place_of(evidence)):
            self._open(explain_trace(evidence, self._rank, live.reason), evidence, bad)
        caught = self._arming.caught(bad)
        if self._casebook.cases:
            self._casebook.cases[-1].occurrences += caught  # the failure that armed the tracing was this one

    def _open(self, incident: Incident, evidence: Evidence, bad: BadResult) -> None:
        case = self._unrecorded.told_of(incident, evidence, bad)
        if case is not None:
            case.came_back(bad.step)
            self._casebook.retell(case, better(incident, case.incident.step))
            return
        first = self._unrecorded.take_unexplained(bad, self._arming.unexplained)
        if first is not None:
            incident = better(incident, first.step)
        self._open_as(self._casebook.second_opinion(self._with_past(incident)), evidence, bad, first)
        self._unrecorded.is_given(self._casebook.cases[-1], bad)

    def _open_as(
        self, opinion: Incident | Case, evidence: Evidence, bad: BadResult, first: BadResult | None = None
    ) -> None:
        """`first`: the failure of which nothing was found out, and that this one shows."""
        self._casebook.open(opinion, bad, place_of(evidence))
        if first is not None:
            case = opinion if isinstance(opinion, Case) else self._casebook.cases[-1]
            case.occurrences += self._arming.caught(bad)
            case.last_step = bad.step
        self._casebook.cases[-1].mended |= evidence.mended
        self._casebook.kept_state.note_written(evidence, self._casebook.cases[-1])
        self._casebook.left_inside.note(evidence, bad, self._casebook.cases[-1])
        if isinstance(opinion, Incident) and opinion.severity == "info":  # normal operation takes none of the looks
            self._looks -= 1

    def _with_past(self, incident: Incident) -> Incident:
        """A parameter or buffer that was bad before the step: since when, and what made it so."""
        if incident.cause != "nonfinite-parameter":
            return incident
        spoiled_by = self._casebook.poison.buffer(str(incident.evidence.get("name")))
        told = self._casebook.past.told(incident, spoiled_by, is_incomplete=bool(self._arming.unexplained))
        if self._casebook.past.changed_before(incident) is not None:
            self._arming.forget_gradients()
        return told

    def _innocent(self, bad: BadResult) -> None:
        self._looks -= 1
        roots = [event for event in bad.record.events if isinstance(event, RootCall)]
        if bad.kind == "output" and roots:
            self._recorder.judge.outputs.mark_innocent(roots[-1].module)

    def _cannot_replay(self, bad: BadResult, reason: str) -> None:
        """The step cannot be run again: that is told, unless a scaler has skipped it and may do so at times."""
        if not bad.is_held_off or self._casebook.skipped.cannot_be_replayed():
            self._arm(bad, reason)

    def _arm(self, bad: BadResult, reason: str) -> None:
        """The step cannot be replayed: watch the coming ones operator by operator."""
        if self._was_given_bad(bad, reason):
            return
        story = self._casebook.story_of(None) if bad.mode == "train" else None
        if story is not None:  # the weights are as large as when that was told
            self._casebook.count(story, bad, calls_behind(bad))
            return
        poison = self._casebook.poison
        if bad.mode == "train" and poison.unknown_since is None:
            poison.unknown_since, poison.unknown_step = self._recorder.steps.attempts, bad.step
        caught_live = [c for c in self._casebook.cases if c.incident.evidence.get("rung") == "live-trace"]
        known = next((c for c in reversed(caught_live) if c.incident.mode == bad.mode), None)
        if known is not None:  # its like was caught live before
            known.came_back(bad.step)
        else:
            self._arming.keep(bad, reason)
        if bad.graph is not None:
            return  # its replays run no Python: there is nothing to watch
        if not self._unrecorded.attends(bad):
            self._arming.arm(bad, reason)


def _is_of_targets(finding: Finding) -> bool:
    """Whether the figures are bad because none of the targets is known; a single one that is not spoils a mean."""
    facts = finding.evidence
    is_target = finding.cause == "nonfinite-input" and facts.get("role") == "target"
    return is_target and facts["values"].get("finite_share") == 0
