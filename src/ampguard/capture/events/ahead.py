"""Batches that are computed in an iteration before their own: a prefetcher's.

Glue of a finished iteration is forgotten. What may have made batches yet to come is kept as long as they are in use, for up
to `MAX_AHEAD` iterations: in the first of a run, and from there on where those show that a batch was computed (and not just
moved) in an iteration before its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ampguard.capture.events.forgetting import has_live_result
from ampguard.capture.events.operands import held_by, refs_of
from ampguard.capture.events.producers import Producers
from ampguard.capture.glue.preprocessing import only_moves
from ampguard.capture.record import Event, GlueOp, RootCall
from ampguard.capture.root_calls.trees import tensors_in
from ampguard.compat import version_of

MAX_AHEAD = 4
"""Iterations by which a batch may be computed ahead of its own."""


class PreparedAhead:
    """Knows which operators of finished iterations have made what is yet to be used."""

    def __init__(self) -> None:
        self.is_usual = False
        """Whether the script computes batches ahead."""
        self.is_learning = True
        """Whether that is yet to be seen: a queue may be filled before anybody looks, and give what it made later then."""
        self.kept: set[int] = set()
        """Such operators, by the index of their events."""
        self._ended = 0
        self._starts: deque[int] = deque([0], MAX_AHEAD)
        """The first events of the iterations before the running one."""

    def learn(self, given: Any, events: Sequence[Event], iteration_start: int, producers: Producers) -> bool:
        """A call in one of the first steps was given this: was any of it computed in an iteration before?

        What a call of that iteration was given as well is used again, and not prepared.
        """
        finished = [event for event in events if event.index < iteration_start]
        prepared = self._among(finished)
        if not all(only_moves(event) for event in finished if event.index in prepared):
            made = (producers.of(tensor, version_of(tensor)) for tensor in tensors_in(given))
            used = {ref.event for event in finished if isinstance(event, RootCall) for ref in refs_of(event)}
            self.is_usual = any(ref is not None and ref.event in prepared - used for ref in made)
            self.kept = prepared
        return self.is_usual

    def iteration_ended(self, start: int, events: Sequence[Event]) -> None:
        """The iteration that began with event `start` is over."""
        self._starts.append(start)
        self._ended += 1
        if self._ended > MAX_AHEAD:
            self.is_learning = False
        if self.is_usual or self.is_learning:
            self.look(events)
        elif self.kept:
            self.kept = set()

    def look(self, events: Sequence[Event]) -> None:
        """See which of these are still to be kept."""
        self.kept = self._among(events)

    def _among(self, events: Sequence[Event]) -> set[int]:
        """Operators outside modules that have made something still in use, and those that it was made from: as far as no
        module and nothing that wants a gradient had a part in it."""
        plain: dict[int, Event] = {}
        for event in events:
            if not isinstance(event, GlueOp) or event.index < self._starts[0] or event.error is not None:
                continue
            if all(ref.event in plain for ref in refs_of(event)) and not _wants_gradient(event):
                plain[event.index] = event
        pending = [event for event in plain.values() if has_live_result(event)]
        found: set[int] = set()
        while pending:
            event = pending.pop()
            if event.index not in found:
                found.add(event.index)
                pending += [plain[ref.event] for ref in refs_of(event)]
        return found


def _wants_gradient(event: GlueOp) -> bool:
    made = (ref() for ref in event.outputs)
    given = (held.tensor for held in held_by(event))
    return any(tensor is not None and tensor.requires_grad for tensor in (*made, *given))
