"""A long evaluation: thousands of small calls, whose results a script adds up or keeps in a list for a figure at the end.

What is still in use keeps the events that it came from, and of so many calls that is too much to keep. So the record is
cut: what the script holds is given from there on. Finite results have nothing to tell. One that is bad already (a sum
to which one bad sample was added) keeps the events of the stretch in which it became so, and what is computed from it
is followed to it: when the script reads a figure, that stretch is what is told. `origin` says which one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ampguard.capture.events import lineage
from ampguard.capture.flags import is_immediate
from ampguard.capture.record import Event, GlueOp, Ref, StepRecord
from ampguard.numerics import is_finite

CUT_FROM = 2048
"""Events from which on the record of an evaluation is cut: so many are still in use."""

CUT_AGAIN = 512
"""Events, in use or not, after which that is done again."""

MOST_ORIGINS = 8
"""Stretches that are kept because something became bad in them."""

MAX_LOOK = 1 << 16
"""Elements up to which a result that is in use is looked at."""


@dataclass(slots=True)
class Origin:
    """The stretch of an evaluation in which a result became bad, and which one."""

    record: StepRecord
    target: Ref
    is_told: bool = False


class LongEvaluation:
    """What was cut off from the events that it came from."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[weakref.ref[Tensor], Origin | None]] = {}
        """By identity: results of calls, or of what was computed from them. Sums that go on in place are the same tensor."""
        self._origins: list[Origin] = []
        self._purge_at = 2 * CUT_FROM
        self.is_under_way = False
        """Whether it has turned out to be one."""

    def clear(self) -> None:
        """Training goes on."""
        self.is_under_way = False
        if self.made:
            self.made.clear()
            self._origins.clear()

    def may_cut(self, events: int) -> bool:
        """Whether so many events are enough."""
        return events > (CUT_AGAIN if self.is_under_way else CUT_FROM)

    def cut(
        self, events: Iterable[Event], lookup: Callable[[Tensor], Ref | None], snapshot: Callable[[], StepRecord]
    ) -> None:
        """The events are about to be dropped."""
        self.is_under_way = True
        found: list[tuple[Ref, Tensor]] = []
        for event in events:
            for position, output in enumerate(event.outputs):
                tensor = output()
                if tensor is None or not event.floating[position]:
                    continue
                if isinstance(event, GlueOp) and _is_bad(tensor) and lookup(tensor) == Ref(event.index, position):
                    found.append((Ref(event.index, position), tensor))
                elif id(tensor) not in self.made or self._known(tensor) is None:
                    self.made[id(tensor)] = weakref.ref(tensor), None
        record: StepRecord | None = None
        for ref, tensor in found:
            record = record or snapshot()
            self.made[id(tensor)] = weakref.ref(tensor), self.origin(record, ref) or self._new(record, ref)
        if len(self.made) > self._purge_at:
            self.made = {key: known for key, known in self.made.items() if known[0]() is not None}
            self._purge_at = 2 * max(len(self.made), CUT_FROM)

    def note_dropped(self, events: Iterable[Event], kept: Container[int], known: dict[int, Any]) -> None:
        """Events are about to be dropped though some of their results are in use: those are given from here on.

        What modules return in evaluation has been looked at. `known`: which event made a tensor, by identity.
        """
        for event in events:
            if event.index in kept:
                continue
            for position, output in enumerate(event.outputs):
                tensor = output()
                if tensor is not None and event.floating[position] and known.pop(id(tensor), None) is not None:
                    self.made[id(tensor)] = weakref.ref(tensor), None

    def _new(self, record: StepRecord, ref: Ref) -> Origin | None:
        if len(self._origins) >= MOST_ORIGINS or not self.is_behind(record, ref):
            return None
        self._origins.append(Origin(record, ref))
        return self._origins[-1]

    def _known(self, tensor: Tensor) -> tuple[weakref.ref[Tensor], Origin | None] | None:
        known = self.made.get(id(tensor)) if self.made else None
        return known if known is not None and known[0]() is tensor else None

    def of(self, tensor: Tensor) -> Origin | None:
        """Where a tensor that was cut off became bad; None where it was not bad, or is not known."""
        known = self._known(tensor)
        return known[1] if known is not None else None

    def origin(self, record: StepRecord, ref: Ref) -> Origin | None:
        """The origin of a value that went into this one."""
        if not self._origins:
            return None
        return next((origin for tensor in lineage.given_to(record, ref) if (origin := self.of(tensor))), None)

    def is_behind(self, record: StepRecord, ref: Ref) -> bool:
        """Whether it was computed from the result of a call, by a model without modules, or from what was cut off."""
        if lineage.comes_from_a_root(record, ref) or lineage.comes_from_weights(record, ref):
            return True
        return bool(self.made) and any(self._known(tensor) is not None for tensor in lineage.given_to(record, ref))


def _is_bad(tensor: Tensor) -> bool:
    is_small = tensor.numel() <= MAX_LOOK and is_immediate(tensor)
    return is_small and not is_finite(tensor.detach())
