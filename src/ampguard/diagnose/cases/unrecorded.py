"""Failures in steps of which not everything was recorded, because that would have cost too much.

The steps behind one are recorded whole. If it comes back, what is seen then is told of the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ampguard.capture.record import BadResult
from ampguard.capture.recorder import FlightRecorder
from ampguard.diagnose.cases.case import Case, Place, place_of
from ampguard.diagnose.evidence import Evidence
from ampguard.incident import Incident

ATTENTIVE_STEPS = 50
"""Steps that are recorded whole behind such a failure."""

MOST_TIMES = 4
"""How often that is done in a run."""


class Unrecorded:
    """The case that may be told better, and whether the coming steps are recorded whole."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._case: Case | None = None
        self._place: Place | None = None
        self._until = 0
        self._times = 0
        self._partial: set[int] = set()
        """The steps of which not everything was recorded."""

    def attends(self, bad: BadResult) -> bool:
        """Record the next steps whole, if something of this one was passed over. Whether it was."""
        is_partial = self._recorder.passed_over == bad.step
        if is_partial and self._times < MOST_TIMES:
            self._times += 1
            self._partial.add(bad.step)
            self._until = bad.step + ATTENTIVE_STEPS
            self._recorder.attend(ATTENTIVE_STEPS)
        return is_partial

    def is_given(self, case: Case, bad: BadResult) -> None:
        """A tensor that the step was given was bad, as far as is known: what made it may have been passed over."""
        if case.incident.cause == "nonfinite-input" and self.attends(bad):
            self._case, self._place = case, case.place

    def shows_more(self, bad: BadResult) -> bool:
        """Whether this failure is to be looked at, though its like was told: it may show what made the bad tensor."""
        return self._case is not None and bad.step <= self._until and bad.mode == self._case.incident.mode

    def take_unexplained(self, bad: BadResult, unexplained: Sequence[tuple[BadResult, str]]) -> BadResult | None:
        """The failure of which nothing was found out, because it was not recorded, that this one shows."""
        if bad.step > self._until:
            return None
        alike = (first for first, _ in unexplained if (first.mode, first.kind) == (bad.mode, bad.kind))
        found = next((first for first in alike if first.step in self._partial), None)
        if found is not None:
            self.end()
        return found

    def end(self) -> None:
        """It is known, or cannot be any more: the next steps are recorded as usual."""
        if self._case is not None or self._recorder.pace.is_attentive:
            self._case = None
            self._recorder.attend(0)

    def told_of(self, incident: Incident, evidence: Evidence, bad: BadResult) -> Case | None:
        """The case that a failure, seen whole, explains: its bad values have gone through the place at which that began."""
        case = self._case
        if case is None or not self.shows_more(bad) or incident.cause == "nonfinite-input":
            return None
        if not _goes_through(evidence, self._place):
            return None
        self.end()
        case.place = place_of(evidence)
        return case


def better(later: Incident, first: int) -> Incident:
    """What a later failure has shown, told of step `first`, the first of its kind."""
    text = f" What made it in step {first} was not recorded; this was seen in step {later.step}, where it came back."
    evidence = later.evidence | {"seen_in_step": later.step}
    return msgspec.structs.replace(later, step=first, explanation=later.explanation + text, evidence=evidence)


def _goes_through(evidence: Evidence, place: Place | None) -> bool:
    """Whether an operator at this place was given a bad value."""
    if place is None:
        return False
    return any(op.is_bad and op.place[1:] == place[2:] for op in evidence.trace.ops)
