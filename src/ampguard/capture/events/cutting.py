"""Cutting finished steps off a record whose steps hang together: each computes its weights from those of the last one.

Nothing that was made before the cut is kept, unless the script still holds it, as it was then: then it is a tensor that is
given. What cannot be computed without the rest is not kept either.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from ampguard.capture.events.operands import refs_of
from ampguard.capture.record import Event, GlueOp, Held, Ref, RootCall
from ampguard.compat import storage_key, version_of


def cut_before(events: Iterable[Event], start: int) -> list[Event]:
    """The events from `start` on that can still be computed, with what was made before `start` as given tensors."""
    events = list(events)
    written = _storages(event for event in events if event.index >= start)
    before: dict[int, Event] = {}
    kept: list[Event] = []
    for event in events:
        if event.index < start:
            before[event.index] = event
            continue
        refs = {ref for ref in refs_of(event) if ref.event < start or ref.event in before}
        if not refs:
            kept.append(event)
            continue
        given = {ref: held for ref in refs if (held := _given(before.get(ref.event), ref, written)) is not None}
        if len(given) < len(refs):
            before[event.index] = event
        else:
            kept.append(_with_given(event, given))
    return kept


def _storages(events: Iterable[Event]) -> set[int]:
    """Where the results of these lie: some may have been written in place."""
    live = (ref() for event in events for ref in event.outputs)
    return {storage_key(tensor) for tensor in live if tensor is not None}


def _given(event: Event | None, ref: Ref, written: set[int]) -> Held | None:
    """What an event returned, if the script still holds it and nothing has been written to it since the cut."""
    tensor = event.outputs[ref.output]() if event is not None and ref.output < len(event.outputs) else None
    return Held(tensor, version_of(tensor)) if tensor is not None and storage_key(tensor) not in written else None


def _with_given(event: Event, given: dict[Ref, Held]) -> Event:
    event = copy.copy(event)  # an investigation may still hold the other one
    event.args = _replaced(event.args, given)
    if isinstance(event, (GlueOp, RootCall)):
        event.kwargs = _replaced(event.kwargs, given)
    if isinstance(event, RootCall) and event.swapped_state:
        event.swapped_state = _replaced(event.swapped_state, given)
    return event


def _replaced(tree: Any, given: dict[Ref, Held]) -> Any:
    if type(tree) is Ref:
        return given.get(tree, tree)
    if type(tree) is dict:
        return {key: _replaced(value, given) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        items = [_replaced(value, given) for value in tree]
        return tuple(items) if type(tree) is tuple else items
    return tree
