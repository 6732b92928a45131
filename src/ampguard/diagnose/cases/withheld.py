"""State that a script keeps beside its modules, and that a step has spoiled: told once something has read it.

Why it is bad can be found out in that step only. Whether that matters shows later: figures that nothing reads may well be NaN.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch import Tensor

from ampguard import compat
from ampguard.capture.events.lineage import events_behind
from ampguard.capture.events.operands import held_by
from ampguard.capture.judging.leaving_lines import Place as CodeLine
from ampguard.capture.judging.leaving_lines import place_of
from ampguard.capture.record import BadResult, Event, Held, Ref, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.diagnose.cases.case import Case, Place
from ampguard.diagnose.evidence import Evidence
from ampguard.incident import Incident
from ampguard.numerics import is_finite

MOST_LOOKS = 8
"""Times that state which has gone bad is looked into: figures of the script's may go bad and recover in every other step."""

GIVEN = frozenset({"nonfinite-parameter", "nonfinite-input"})
"""Causes of which state may be what was given bad."""
OF_PRECISION = frozenset({"fp16-overflow", "fp16-underflow", "mask-overflow"})
"""Causes that nobody means: float32 has numbers there, and an Inf in the state may silently make 0 of what reads it."""
OF_INFINITIES = GIVEN | {"indeterminate"}
"""The same, where an infinity of the state is taken for one that is meant."""


@dataclass
class Withheld:
    """State was spoiled, and why is known."""

    incident: Incident
    evidence: Evidence
    place: Place
    state: list[weakref.ref[Tensor]] = field(default_factory=list)
    lines: set[CodeLine] = field(default_factory=set)
    """Those outside modules that have left it."""
    names: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """Those that a call has bound to it: in which dictionary, and which."""

    @classmethod
    def of(cls, incident: Incident, evidence: Evidence, place: Place) -> Withheld:
        withheld = cls(incident, evidence, place)
        withheld.goes_on(evidence.bad)
        return withheld

    def goes_on(self, bad: BadResult) -> None:
        """This was spoiled, too."""
        self.state = [ref for ref in self.state if ref() is not None]
        for event, output in _made(bad):
            self.state.append(event.outputs[output])
            if event.line is not None:
                self.lines.add(place_of(event.line))
        spoiled = [target.tensor for target in bad.targets if isinstance(target, Held)]
        self.state += map(weakref.ref, spoiled)
        for owner, name, _ in bound_in(bad):
            if any(owner.get(name) is tensor for tensor in spoiled):
                self.names.append((owner, name))

    def told_of(self, bad: BadResult) -> Incident:
        """The incident, now that `bad` has read the state."""
        reader = f"in step {bad.step}" if bad.mode == "train" else "in evaluation"
        text = f"{self.incident.explanation} It is kept over the steps, and was finite before; what fails {reader} reads it."
        return msgspec.structs.replace(self.incident, explanation=text)

    def told_unread(self) -> Incident | None:
        """The incident, now that the run is over and nothing has read the state; None of what no checkpoint would hold."""
        if not is_of_module(self.evidence.bad):
            return None
        names = ", ".join(f"`{name}`" for name in self.evidence.bad.names)
        text = (
            f"{self.incident.explanation} It is kept in {names}, and nothing that failed in this run has read it. A "
            f"checkpoint holds it."
        )
        return msgspec.structs.replace(self.incident, explanation=text, severity="info")


class WithheldStates:
    """Keeps them until they are read, and what comes of them after that."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._waiting: list[Withheld] = []
        self._told: list[tuple[Withheld, Case]] = []
        self._looks = 0

    def may_look(self) -> bool:
        """Whether state that has gone bad may be looked into, once more."""
        self._looks += 1
        if self._looks == MOST_LOOKS:
            self._recorder.carried.rest(line for known in self._waiting for line in known.lines)
        return self._looks <= MOST_LOOKS

    def add(self, withheld: Withheld) -> None:
        """Nobody knows yet whether anything reads it. More of what the same place has spoiled goes with that, unless it has
        recovered since."""
        known = next((known for known in self._waiting if known.place == withheld.place), None)
        if known is not None and self._is_bad(known, withheld.evidence.bad):
            known.goes_on(withheld.evidence.bad)
            return
        self._waiting = [other for other in self._waiting if other is not known]
        self._waiting.append(withheld)

    def _is_bad(self, withheld: Withheld, bad: BadResult) -> bool:
        """Whether anything of it is still bad."""
        return any(state is not None and not is_finite(state.detach()) for state in self._state_of(withheld, bad))

    def take_unread(self) -> list[Incident]:
        """The run is over: what is to be said of those that nothing has read."""
        waiting, self._waiting = self._waiting, []
        return [incident for known in waiting if (incident := known.told_unread()) is not None]

    def is_made_of(self, given: list[Tensor], bad: BadResult) -> bool:
        """Whether state is bad because it was made from some that is known to be: that lies in other places then, too."""
        known = (*self._waiting, *(withheld for withheld, _ in self._told))
        found = next((withheld for withheld in known if self._holds(withheld, given, bad)), None)
        if found is not None:
            found.goes_on(bad)
        return found is not None

    def take_read(self, cause: str, given: list[Tensor], bad: BadResult) -> Withheld | None:
        """What is known of a tensor that has been read now: one of these."""
        if cause not in OF_INFINITIES:
            return None
        return self._take(next((known for known in self._waiting if self._holds(known, given, bad)), None))

    def take_refused(self, bad: BadResult) -> Withheld | None:
        """What is known of state that an operator raised over."""
        made = {i for t in bad.targets if isinstance(t, Ref) for i in events_behind(bad.record, t.event)}
        behind = [event for index in made if (event := bad.record.event(index)) is not None]
        results = (ref() for event in behind for ref in event.outputs)
        given = [*(held.tensor for event in behind for held in held_by(event)), *(t for t in results if t is not None)]
        return self._take(next((known for known in self._waiting if self._holds(known, given, bad)), None))

    def take_at(self, place: Place, step: int) -> Withheld | None:
        """What is known of a place at which the failure of a step begins, if that was in an earlier one. Batches that are
        prepared ahead belong to the step that takes them."""
        found = self._take(next((known for known in self._waiting if known.place == place), None))
        is_earlier = found is not None and found.incident.step < step
        return found if is_earlier and not self._recorder.log.ahead.is_usual else None

    def _take(self, found: Withheld | None) -> Withheld | None:
        if found is not None:
            self._waiting.remove(found)
        return found

    def note_told(self, withheld: Withheld, case: Case) -> None:
        """It was told as `case`."""
        self._told.append((withheld, case))

    def told_of(self, given: list[Tensor], bad: BadResult) -> Case | None:
        """As which case it was told that one of these tensors is bad."""
        return next((case for withheld, case in self._told if self._holds(withheld, given, bad)), None)

    def _holds(self, withheld: Withheld, given: list[Tensor], bad: BadResult) -> bool:
        """Whether it is about one of these tensors, from which a bad result was made, or about what it is a part of."""
        return any(is_part_of(tensor, state) for state in self._state_of(withheld, bad) for tensor in given)

    def _state_of(self, withheld: Withheld, bad: BadResult) -> Iterator[Tensor | None]:
        """What was spoiled, and what the same lines and calls have left since."""
        yield from (ref() for ref in withheld.state)
        yield from self._recorder.carried.left_bad_by(withheld.lines)
        for owner, name in withheld.names:
            bound = [value for place, key, value in bound_in(bad) if place is owner and key == name]
            yield from (value for value in (owner.get(name), *bound) if isinstance(value, Tensor))


def is_of_module(bad: BadResult) -> bool:
    """Whether what is bad hangs in a module that was called: a buffer, or a plain attribute."""
    spoiled = {id(target.tensor) for target in bad.targets if isinstance(target, Held)}
    parts = [
        part for event in bad.record.events if isinstance(event, RootCall) for part in compat.all_modules(event.module)
    ]
    held = (tensor for part in parts for tensor in (*compat.buffers_of(part).values(), *vars(part).values()))
    return any(id(tensor) in spoiled for tensor in held)


def is_part_of(given: Tensor | None, known: Tensor | None) -> bool:
    """Whether a tensor is another one, or lies in its memory."""
    if given is None or known is None:
        return False
    return given is known or compat.storage_key(given) == compat.storage_key(known) != 0


def _made(bad: BadResult) -> list[tuple[Event, int]]:
    """The events that have made what a bad result is about, and which of their results that is."""
    made = ((bad.record.event(t.event), t.output) for t in bad.targets if isinstance(t, Ref))
    return [(event, output) for event, output in made if event is not None and output < len(event.outputs)]


def bound_in(bad: BadResult) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The names that calls of its step have bound anew, and what they stood for before."""
    for event in bad.record.events:
        if isinstance(event, RootCall):
            yield from ((saved.owner, saved.name, saved.value) for saved in event.attributes)
            yield from ((saved.owner, saved.name, saved.tensor) for saved in event.buffers)
