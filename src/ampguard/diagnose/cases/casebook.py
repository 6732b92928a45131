"""The incidents of a run: what is told, what is counted to an earlier one, what is a consequence of another."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import torch

from ampguard.capture.record import BadResult, Ref
from ampguard.capture.recorder import FlightRecorder
from ampguard.diagnose.cases.bad_since import BadSince
from ampguard.diagnose.cases.case import Case, Place, is_thrown_away
from ampguard.diagnose.cases.further import FurtherFailures
from ampguard.diagnose.cases.kept_state import KeptState
from ampguard.diagnose.cases.left_inside import LeftInside
from ampguard.diagnose.cases.past_scaler import PastScaler
from ampguard.diagnose.cases.poison import Poison
from ampguard.diagnose.cases.recurrence import calls_behind, goes_on_from
from ampguard.diagnose.cases.skipped import SkippedSteps
from ampguard.diagnose.code.torch_name import in_names_of_its_file
from ampguard.incident import Incident, importance, training_first
from ampguard.replay.sandbox import neutral_thread
from ampguard.replay.variants import CodePlace

MOST_EVENTS = 256
"""Bad results that are remembered, the latest: in a run that goes on failing there is no end to them."""


OF_NOTHING = frozenset({"division-by-zero", "empty-reduction"})


class Casebook:
    """Keeps the cases, and what each has led to."""

    def __init__(self, recorder: FlightRecorder, on_new: Callable[[Incident], None]) -> None:
        self.cases: list[Case] = []
        self._recorder = recorder
        self._on_new = on_new
        self.skipped = SkippedSteps(recorder)
        self.further = FurtherFailures()
        self.poison = Poison(recorder)
        self.kept_state = KeptState(recorder)
        self.left_inside = LeftInside()
        self.past = BadSince(recorder)
        self.past_scaler = PastScaler(self._tell)
        self._bad_events: dict[int, Case] = {}
        """What was told of, by the event that made it."""
        self.has_unseen = False
        """A loss was bad that no investigation was left for, and no incident is there to count it to."""
        self._told_later: list[Incident] | None = None
        """What is found out while models are not as the script has made them: whoever hears of it may change them."""
        self.second_opinion: Callable[[Incident], Incident | Case] = lambda incident: incident
        """Asked about each new failure by those who know the run's history: is it the end of a longer story, or (a case)
        of one that has been told?"""
        self.faint_since: Callable[[], int | None] = lambda: None
        """The first of the looks in a row in which gradients stood at float16's lower edge."""
        self.largest_loss: Callable[[], float] = lambda: 0.0
        """The largest |loss| of the run so far."""
        self.ends_of_stories: frozenset[str] = frozenset()
        """Causes of which the same is asked before fixes are looked for."""
        self.opinion_before_fixes: Callable[[Incident], Incident | Case | None] = lambda incident: None
        """Asked then; None where it is no end of a longer story."""
        self.story_of: Callable[[str | None], Case | None] = lambda cause: None
        """Asked about a cause (None: whatever it is) before fixes are tried: of which case that was told would it be one
        more end?"""
        self.breach_behind: Callable[[str, BadResult], Case | None] = lambda cause, bad: None
        """Asked about the same: from which broken protocol that was told does it follow?"""
        self.fall_behind: Callable[[Incident], Case | None] = lambda incident: None
        """Asked about gradients that are flushed to zero: which failure that was told has made the loss scale fall to that?"""
        self.as_told: Callable[[Incident], Incident] = lambda incident: incident
        """Gives an incident that was replayed the words that fit how the run was started."""
        self.came_back: Callable[[Incident], None] = lambda incident: None
        """Told of a failure that is counted to an earlier one, as that with the step of this."""

    def add(
        self, incident: Incident, poisons: bool = False, optimizer: weakref.ref[torch.optim.Optimizer] | None = None
    ) -> Case:
        """Take in an incident that needed no replay: a broken protocol, a course over many steps.

        `poisons`: an optimizer has just made its parameters non-finite; what fails from now on is its doing.
        `optimizer`: whose gradients a broken protocol is about.
        """
        incident = in_names_of_its_file(incident)
        case = Case(
            incident,
            ("", None, None, None),
            self._recorder.steps.attempts,
            last_step=incident.step,
            is_investigated=False,
        )
        case.optimizer = optimizer
        self.cases.append(case)
        if poisons:
            self.poison.began_with(case)
        overflow = self.past_scaler.was_noticed(case)
        if overflow is not None:
            self.poison.is_told_as(overflow, case)
        self._tell(incident)
        return case

    def add_underflow(self, incident: Incident) -> None:
        """Gradients are flushed to zero: a failure, or what follows from that which has made the loss scale fall."""
        behind = self.fall_behind(incident)
        if behind is None:
            self.add(incident)
            return
        part = Case(incident, ("", None, None, None), self._recorder.steps.attempts, last_step=incident.step)
        part.is_investigated = False
        self.cases.append(part)
        part.follows_from(behind, incident.cause)

    def _tell(self, incident: Incident) -> None:
        """Tell of a new incident. What prints the first card imports libraries, and one of them draws from `random`."""
        if self._told_later is not None:
            self._told_later.append(incident)
            return
        with neutral_thread():
            self._on_new(incident)

    @contextmanager
    def telling_later(self) -> Iterator[None]:
        """What is found out inside is told at the end."""
        self._told_later = []
        try:
            yield
        finally:
            found, self._told_later = self._told_later, None
        for incident in found:
            self._tell(incident)

    def trained(self) -> list[torch.Tensor]:
        """What the optimizers that have stepped hold and move: frozen parameters are left out."""
        held = [(o, p) for o in self._recorder.steps.made_since(0) for group in o.param_groups for p in group["params"]]
        return [p for optimizer, p in held if p.requires_grad or p in getattr(optimizer, "state", ())]

    def retell(self, case: Case, incident: Incident) -> None:
        """The same failure, better understood: the case goes on under another cause."""
        case.incident = incident
        self._tell(incident)

    def merge(self, case: Case, story: Case, what: str | None = None) -> None:
        """This case is a part of a longer story: it is no incident of its own any more. `what`: it in words."""
        if story.is_breach:
            case.follows_from(story, what)
            return
        case.part_of = story
        story.occurrences += case.occurrences

    def incidents(self) -> tuple[Incident, ...]:
        """The incidents so far, the most important first."""
        found = sorted([case.result() for case in self.cases if case.part_of is None], key=importance)
        return tuple(training_first(found))

    def latest(self, cause: str) -> Case | None:
        """The last failure of this cause in training that stands for itself."""
        alike = (c for c in reversed(self.cases) if c.incident.cause == cause and c.incident.mode == "train")
        return next((case for case in alike if case.part_of is None), None)

    def told_before(self, bad: BadResult, place: Place) -> bool:
        """Whether this failure began where an earlier one did; it is counted to that."""
        calls = calls_behind(bad)
        for case in self.cases:
            is_no_scales_doing = bad.is_held_off and bad.loss_scale is not None and bad.loss_scale <= 1.0
            is_news = bad.has_ended_run or bad.is_past_scaler or bad.is_replaced or is_no_scales_doing
            if is_news and case.incident.severity == "info":
                continue  # it was normal then
            is_of_mode = case.incident.mode == bad.mode or bad.kind == "buffer" or case.is_of_state
            if case.place == place and is_of_mode:
                self.count(case, bad, calls)
                self.further.led_to(bad, case)
                return True
        return False

    def told_as_mended(self, cause: str, bad: BadResult, place: CodePlace) -> bool:
        """Whether a fix that was told mends this place too, which fails as the accused one did; it is counted to that."""
        case = next((c for c in self.cases if place in c.mended and _is_alike(c.incident.cause, cause)), None)
        if case is None or case.incident.mode != bad.mode:
            return False
        self.count(case, bad, calls_behind(bad))
        self.further.led_to(bad, case)
        return True

    def told_alike(self, incident: Incident, bad: BadResult) -> bool:
        """Whether the same was told of the same place; it is counted to that. Bad data show first here or there, and a line
        whose result does not fit may overflow in another of its operators: what mends it is the same."""
        is_same = _told if incident.cause == "nonfinite-input" else _mended
        told = is_same(incident)
        case = next(
            (c for c in self.cases if c.is_investigated and told is not None and is_same(c.incident) == told), None
        )
        if case is not None:
            self.count(case, bad, calls_behind(bad))
            self.further.led_to(bad, case)
        return case is not None

    def goes_on(self, bad: BadResult) -> bool:
        """Whether this failure only hands on one that was told; it is counted to that."""
        event = goes_on_from(bad, self._bad_events)
        if event is None:
            return False
        self.count(self._bad_events[event], bad, calls_behind(bad))
        return True

    def hands_on(self, cause: str, bad: BadResult, event: int) -> bool:
        """Whether a bad value that a call was given came with what is told of that call; it is counted to that.

        A decoder's second call reads what its first one cached of the encoder's result.
        """
        case = self._bad_events.get(event)
        if case is None or cause != "nonfinite-input":
            return False
        self.count(case, bad, calls_behind(bad))
        return True

    def _note_targets(self, case: Case, bad: BadResult) -> None:
        self._bad_events |= {target.event: case for target in bad.targets if isinstance(target, Ref)}
        for event in list(self._bad_events)[:-MOST_EVENTS]:
            del self._bad_events[event]

    def count(self, case: Case, bad: BadResult, calls: frozenset[int]) -> None:
        """A failure is one more of `case`, or another result of the same calls."""
        if (
            "range_test" in case.incident.evidence
            and bad.step > case.incident.step
            and case.incident.severity == "info"
        ):
            self.retell(case, msgspec.structs.replace(case.incident, severity="error"))  # the weights were not restored
        is_same = bad.kind == "buffer" or bool(case.calls & calls)
        case.calls = calls or case.calls
        self._note_targets(case, bad)
        self.skipped.note(bad, case)
        self.left_inside.note_unseen(bad, case)
        case.came_back(bad.step, 0 if is_same else 1)
        case.is_thrown_away &= is_thrown_away(bad)
        self.poison.note(bad, case.told_as)
        if case.part_of is None and self._told_later is None:
            self.came_back(msgspec.structs.replace(case.incident, step=bad.step))

    def open(self, opinion: Incident | Case, bad: BadResult, place: Place) -> None:
        """A new failure as it is told; or (a case) one more end of a story that was told."""
        if isinstance(opinion, Case):
            self._join(opinion, bad, place)
            return
        opinion = in_names_of_its_file(self.as_told(opinion))
        case = Case(opinion, place, self._recorder.steps.attempts, last_step=bad.step, calls=calls_behind(bad))
        case.kind, case.is_thrown_away, case.is_replaced = bad.kind, is_thrown_away(bad), bad.is_replaced
        self._note_targets(case, bad)
        case.is_investigated = opinion.severity != "info"  # normal operation takes none of the investigations
        self.cases.append(case)
        self.skipped.note(bad, case)
        self.further.led_to(bad, case, is_new=True)
        self.poison.note(bad, case)
        self.kept_state.note(bad, case)
        if not self.past_scaler.is_kept_back(case, bad):
            self._tell(opinion)

    def open_unreplayed(self, incident: Incident, bad: BadResult) -> None:
        """A failure that explains itself without a replay."""
        place = (incident.cause, incident.module, None, None)
        known = next((case for case in self.cases if case.place == place), None)
        if known is not None:
            known.came_back(bad.step)
            return
        case = Case(incident, place, self._recorder.steps.attempts, last_step=bad.step, calls=calls_behind(bad))
        case.kind = bad.kind
        self.cases.append(case)
        self.poison.note(bad, case)
        self._tell(incident)

    def open_unexplained(self, incident: Incident, bad: BadResult) -> None:
        """A failure of which nothing was found out."""
        self.cases.append(Case(incident, ("", None, None, None), last_step=bad.step))
        self._tell(incident)

    def follows(self, breach: Case, cause: str, bad: BadResult, place: Place) -> None:
        """This failure is a consequence of a broken protocol that was told."""
        part = Case(breach.incident, place, self._recorder.steps.attempts, is_investigated=False)
        part.calls, part.last_step = calls_behind(bad), bad.step
        self.cases.append(part)
        part.follows_from(breach, cause)
        self.further.led_to(bad, part, is_new=True)
        self.poison.note(bad, breach)

    def _join(self, story: Case, bad: BadResult, place: Place) -> None:
        """This failure is one more end of a story that was told."""
        part = Case(story.incident, place, self._recorder.steps.attempts, is_investigated=False)
        part.calls = story.calls = calls_behind(bad)
        part.last_step = bad.step
        self.cases.append(part)
        self.merge(part, story, "divergence")
        story.last_step = bad.step
        self.further.led_to(bad, story)
        self.poison.note(bad, story)

    def count_unseen(self, bad: BadResult) -> None:
        """Investigations are used up: count it to the last incident of its mode, without looking."""
        for case in reversed(self.cases):
            if case.is_investigated and case.incident.mode == bad.mode:
                break
        else:
            self.has_unseen = self.has_unseen or (bad.kind == "loss" and bad.mode == "train" and not bad.may_be_meant)
            return
        if case is self.poison.case and case.consequences:
            case.consequences += 1
        else:
            case.occurrences += 1
        case.last_step = bad.step


def _is_alike(one: str, other: str) -> bool:
    """Whether two causes are one: a count of nothing divides a sum of nothing here, and another sum there."""
    return one == other or {one, other} <= OF_NOTHING


def _mended(incident: Incident) -> tuple[object, ...] | None:
    """What fails at which line, and what mends it there; None where that is not known."""
    fix = incident.fixes[0] if incident.fixes else None
    if fix is None or not fix.verified or incident.location is None:
        return None
    return incident.cause, incident.severity, incident.mode, incident.module, incident.location, fix.action, fix.how


def _told(incident: Incident) -> tuple[object, ...]:
    """What an incident says of its place."""
    place = (incident.mode, incident.phase, incident.module, incident.op, incident.dtype, incident.location)
    return incident.cause, incident.severity, *place, incident.evidence.get("name")
