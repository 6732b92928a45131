"""What of earlier steps is still in use: by the script, or by what the script made of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence

from ampguard.capture.events.operands import held_by, held_in, refs_of
from ampguard.capture.record import Event, GlueOp, Held, RootCall, since

KEPT_ROOTS = 8
"""Calls of root modules kept from before the last backward, or of an evaluation."""

KEPT_BYTES = 1 << 25
"""Memory that the inputs of older root calls may take up while nothing is differentiated."""

MAX_WINDOW_EVENTS = 2048
"""Events kept of an accumulation window whose optimizer has not stepped yet."""


def still_used(
    events: list[Event],
    later: list[Event],
    iteration_start: int,
    writers: Mapping[int, Sequence[int]],
    prepared: Collection[int] = (),
) -> set[int]:
    """The later events, those with a live result (of root calls: the last few), and what all of them came from.

    Of operators outside modules only those of the running iteration, and what was `prepared` for it.
    `writers` names, for an event, those that wrote to its result in place: what they wrote is part of it.
    """
    alive = [e for e in events if has_live_result(e)]
    roots = [e.index for e in alive if isinstance(e, RootCall)]
    kept = {e.index for e in alive if isinstance(e, GlueOp) and e.index >= iteration_start}
    kept.update(prepared)
    kept |= set(roots[-KEPT_ROOTS:]) | {i for i in roots if i >= iteration_start}
    beyond = beyond_memory(alive, kept)
    kept -= beyond
    kept |= {e.index for e in later}
    present = {e.index: e for e in (*events, *later) if e.index not in beyond}
    pending = list(kept)
    while pending:
        index = pending.pop()
        event = present.get(index)
        if event is not None:
            behind = {ref.event for ref in refs_of(event)} | set(writers.get(index, ()))
            more = (behind & present.keys()) - kept
            kept |= more
            pending += more
    return kept


def has_live_result(event: Event) -> bool:
    """Whether the script still holds something that the event returned (what the event itself holds does not count)."""
    given = event.args[0] if len(event.args) == 1 and not event.kwargs else None
    if type(given) is Held:
        for ref in event.outputs:
            tensor = ref()
            if tensor is not None and tensor is not given.tensor:
                return True
        return False
    own: set[int] | None = None
    for ref in event.outputs:  # (the rows of a whole data set may be thousands)
        tensor = ref()
        if tensor is not None:
            if own is None:
                own = {id(held.tensor) for held in held_by(event)}
            if id(tensor) not in own:
                return True
    return False


def is_evaluating(events: list[Event]) -> bool:
    """Several calls and none with gradients."""
    calls = 0
    for event in events:
        if isinstance(event, RootCall):
            if event.modes.grad:
                return False  # of a long step nearly always the first one
            calls += 1
    return calls > 1


def beyond_memory(alive: list[Event], kept: set[int]) -> set[int]:
    """Older root calls whose inputs would take up too much; without gradient, all but the last few."""
    roots = [e for e in alive if isinstance(e, RootCall) and e.index in kept]
    beyond: set[int] = set()
    size = 0
    for root in reversed(roots[:-KEPT_ROOTS]):
        size += sum(h.tensor.numel() * h.tensor.element_size() for h in held_in((root.args, root.kwargs)))
        if size > KEPT_BYTES or not root.modes.grad:
            beyond.add(root.index)
    for event in alive if beyond else ():  # what was made from them cannot be replayed either
        if event.index in kept and any(ref.event in beyond for ref in refs_of(event)):
            beyond.add(event.index)
    return beyond


class OpenWindow:
    """Adds up what the micro-steps of an accumulation window hold on to, each event once."""

    def __init__(self) -> None:
        self._indices: list[int] = []
        self._sizes: list[int] = [0]
        """What is held up to each of them, in bytes."""

    def clear(self) -> None:
        """Events were dropped from between others."""
        self._indices, self._sizes = [], [0]

    def is_too_large(self, events: Sequence[Event]) -> bool:
        """Whether these hold on to too much. Events may have been added since the last time, and dropped at the beginning."""
        if len(events) > MAX_WINDOW_EVENTS:
            return True
        known = self._indices
        if len(known) > 2 * MAX_WINDOW_EVENTS:
            self.clear()
            known = self._indices
        total = self._sizes[-1]
        for event in since(events, known[-1] + 1) if known else events:
            for held in held_by(event):
                if held.copy is not None or not held.tensor.requires_grad:
                    total += held.tensor.numel() * held.tensor.element_size()
            known.append(event.index)
            self._sizes.append(total)
        first = bisect_left(known, events[0].index) if events else len(known)
        return total - self._sizes[first] > KEPT_BYTES
