"""Which failures of a run are one story: a divergence and each of its ends, a loss scale that falls, what was foretold."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from ampguard.diagnose.cases.case import Case
from ampguard.diagnose.cases.casebook import Casebook
from ampguard.diagnose.dynamics.breached import breach_behind, is_too_large, piled_up_behind, poisoned_behind
from ampguard.diagnose.dynamics.finding import Moment, Situation, ask
from ampguard.diagnose.dynamics.scale_collapse import ITS_GRADIENTS
from ampguard.diagnose.dynamics.situations import Situations
from ampguard.diagnose.dynamics.starved import fall_behind
from ampguard.diagnose.dynamics.trajectory import Trajectory
from ampguard.incident import Incident

OF_LARGE_NUMBERS = frozenset({"fp16-overflow", "overflow", "indeterminate", "gradient-overflow", "loss-scale-overflow"})
"""What weights that have diverged bring about wherever they are used."""

SUPERSEDED_BY = frozenset({"fp16-overflow", "overflow", "divergence"})


class Stories:
    """Asks the rules over many steps, and says of a failure which story it belongs to."""

    def __init__(
        self,
        casebook: Casebook,
        trajectory: Trajectory,
        situations: Situations,
        flush: Callable[[], None],
        note: Callable[[Incident], None],
    ) -> None:
        """`flush`: bring the trajectory up to the present. `note`: of an incident, for the history."""
        self._casebook = casebook
        self._trajectory = trajectory
        self._situations = situations
        self._flush = flush
        self._note = note
        self._told: dict[str, Case] = {}
        self._forecast: Case | None = None
        self._asked: Situation | None = None
        """Of the failure that is being explained: what was replayed for it is not replayed again."""

    def situation(self, step: int) -> Situation:
        """What is known at a step."""
        worst = self._worst_of_fall()
        return self._situations.at(step, worst.result() if worst is not None else None)

    def _situation_of(self, incident: Incident) -> Situation:
        self._flush()
        worst = self._worst_of_fall()
        return self._situations.of(incident, worst.result() if worst is not None else None)

    def foresee(self, step: int) -> None:
        """An activation grows: how long will it fit?"""
        if self._forecast is None and not self._has_overflowed:
            for incident in ask("peaks", self.situation(step)):
                self._forecast = self._add(incident)

    @property
    def _has_overflowed(self) -> bool:
        return any(c.incident.cause in SUPERSEDED_BY and c.incident.mode == "train" for c in self._casebook.cases)

    def fall_goes_on(self, step: int) -> None:
        """The scaler has skipped several steps in a row."""
        self._merge_gradients_of_told_lines()
        self.ask("step", step)

    def ask(self, moment: Moment, step: int) -> None:
        """Take in what the rules answer at this moment, once for each cause."""
        for incident in ask(moment, self.situation(step), self._told):
            if incident.cause not in self._told:
                breach = self.breach_behind(incident.cause, step)
                if breach is not None:
                    Case(incident, ("", None, None, None), last_step=incident.step).follows_from(breach, incident.cause)
                self._told[incident.cause] = breach or self._add(incident)

    def _worst_of_fall(self) -> Case | None:
        """The case behind the steps that the scaler is skipping at present."""
        since = self._trajectory.falling_since
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
        self._note(incident)
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
        since = self._trajectory.falling_since
        return since is not None and case.incident.step >= since and case.part_of is None

    def opinion_before_fixes(self, incident: Incident) -> Incident | Case | None:
        """The cause of a failure is known, and no fix was looked for. Does it end a longer story? Fixes of that one step would be
        of no use then."""
        self._asked = situation = self._situation_of(incident)
        answer = self._answer_to(situation, incident)
        return self._in_its_story(answer) if answer.cause == "divergence" else None

    def second_opinion(self, incident: Incident) -> Incident | Case:
        """A failure was explained: does it end a longer story? The forecast that said so is withdrawn for it."""
        asked, self._asked = self._asked, None
        if asked is None or asked.failure is None or _place_of(asked.failure) != _place_of(incident):
            asked = self._situation_of(incident)
        asked.failure = incident
        return self._in_its_story(self._answer_to(asked, incident))

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
        self._note(incident)
        return incident

    def _case_of_story(self, incident: Incident) -> Case | None:
        """The case of a divergence or a collapse that was told, where this failure is one more end of the same one."""
        collapse = self._told.get("scale-collapse")
        if collapse is not None and incident.cause in ITS_GRADIENTS and self._trajectory.falling_since is not None:
            return collapse
        if incident.cause in OF_LARGE_NUMBERS:
            return self._divergence_that_goes_on()
        known = [c for c in self._casebook.cases if c.incident.cause == "divergence" and c.part_of is None]
        began = incident.evidence.get("began_at_step")
        if incident.cause != "divergence" or began is None:
            return None
        same = next((case for case in known if case.incident.step >= began), None)
        piled_up = piled_up_behind(began, self._casebook.cases, self.situation(incident.step))
        return same or piled_up or self._thrown_away_by(began, incident)

    def story_of(self, cause: str | None) -> Case | None:
        """The divergence that a failure of this cause (None: of any) would be one more end of, before it is looked at any
        closer."""
        if cause is not None and cause not in OF_LARGE_NUMBERS:
            return None
        self._flush()
        return self._divergence_that_goes_on()

    def breach_behind(self, cause: str, step: int) -> Case | None:
        """The broken protocol that was told and from which this follows."""
        poisoned = poisoned_behind(cause, self._casebook.cases, self.situation(step))
        if poisoned is not None or not any(is_too_large(case, step) for case in self._casebook.cases):
            return poisoned
        self._flush()
        return breach_behind(cause, self._casebook.cases, self.situation(step))

    def fall_behind(self, underflow: Incident) -> Case | None:
        """The failure that was told and has made the loss scale fall to where these gradients are flushed to zero."""
        self._flush()
        return fall_behind(underflow, self._casebook.cases, self._trajectory)

    def _divergence_that_goes_on(self) -> Case | None:
        told = [c for c in self._casebook.cases if c.incident.cause == "divergence" and c.part_of is None]
        return next((case for case in told if self._goes_on(case)), None)

    def _thrown_away_by(self, began: int, divergence: Incident) -> Case | None:
        """The failure whose own update has thrown the weights away: when it was told, they were as they should be."""
        updated = {v.step for v in self._trajectory.recent if v.skipped is False and began <= v.step < divergence.step}
        cases = [c for c in self._casebook.cases if c.part_of is None and c.incident.severity == "error"]
        own = [c for c in cases if c.incident.step in updated and c.incident.cause in OF_LARGE_NUMBERS]
        return next((c for c in own if c.incident.mode == "train"), None)

    def _goes_on(self, divergence: Case) -> bool:
        """Whether no loss since it was told has been as low as those before it began: the weights are still as large."""
        facts = divergence.incident.evidence
        began, best = facts.get("began_at_step"), facts.get("best_loss", math.inf)
        return began is not None and not self._trajectory.has_come_down(began, divergence.incident.step, best)


def _place_of(incident: Incident) -> tuple[int, str, str | None, str | None]:
    return incident.step, incident.cause, incident.module, incident.op


def _line_of(incident: Incident) -> tuple[str, int] | None:
    return (incident.location.file, incident.location.line) if incident.location is not None else None


def is_foretold(forecast: Incident, incident: Incident) -> bool:
    """Whether the failure is what the forecast spoke of."""
    if incident.cause not in SUPERSEDED_BY or incident.mode != "train":
        return False
    return incident.cause == "divergence" or incident.module == forecast.module or incident.op == forecast.op
