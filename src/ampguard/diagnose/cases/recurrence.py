"""Is a failure one more of its kind, or the same one, seen at another result?

One bad batch shows in many numbers: in the sum that is differentiated, in each of its terms that the script reads, in
the output and the loss of an evaluation. What they have in common is the call of the model that they were made from.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator

from ampguard.capture.events.lineage import is_float
from ampguard.capture.events.operands import refs_of
from ampguard.capture.record import BadResult, Event, GlueOp, Ref, RootCall, StepRecord
from ampguard.numerics import is_finite

CLEANING = frozenset(
    [
        "__getitem__",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clip",
        "gather",
        "index",
        "index_fill",
        "index_put",
        "index_select",
        "masked_fill",
        "masked_scatter",
        "masked_select",
        "nan_to_num",
        "nanmean",
        "nanmedian",
        "nansum",
        "narrow",
        "select",
        "slice",
        "where",
    ]
)
"""Operators whose result may be finite where an operand is not."""


MOST_CALLS = 64
"""Calls that are listed behind a result: of a rollout of thousands the latest tell as much as all."""

MOST_EVENTS = 4096
"""Events that are gone through for them. What is asked of every bad result may not take longer with each."""


def goes_on_from(bad: BadResult, known: Collection[int]) -> int | None:
    """The latest of these events (each made something bad that was told) from which a bad value of an evaluation goes on.

    A sampler feeds what a model returns to it again: what was bad once is bad in all its steps. Not where the result was
    made from something finite, or through an operator that may have taken the bad out.
    """
    if bad.mode != "eval" or bad.kind not in ("loss", "output"):
        return None
    for target in bad.targets:
        made = bad.record.event(target.event) if isinstance(target, Ref) else None
        for ref in refs_of(made) if isinstance(made, (GlueOp, RootCall)) else ():
            maker = bad.record.event(ref.event)
            read = maker.outputs[ref.output]() if maker is not None and ref.output < len(maker.outputs) else None
            if read is not None and is_finite(read):
                continue
            told, behind = _latest_known(bad.record, ref.event, known)
            if told is not None and not any(map(_may_clean, _between(bad.record, told, behind))):
                return told
    return None


def _latest_known(record: StepRecord, index: int, known: Collection[int]) -> tuple[int | None, set[int]]:
    """The latest of the known events that floating-point values lead from to an event, and the events after it that they do."""
    oldest, behind = min(known, default=index + 1), set[int]()
    for event in _backwards(record, [index], lambda ref: is_float(record, ref)):
        if event.index in known:
            return event.index, behind
        if event.index < oldest:
            break
        behind.add(event.index)
    return None, behind


def _backwards(record: StepRecord, starts: list[int], leads: Callable[[Ref], bool]) -> Iterator[GlueOp | RootCall]:
    """These events and those that lead to them, the latest first."""
    waiting, seen = [-index for index in starts], set(starts)
    heapq.heapify(waiting)
    while waiting:
        event = record.event(-heapq.heappop(waiting))
        if isinstance(event, (GlueOp, RootCall)):
            yield event
            more = {ref.event for ref in refs_of(event) if leads(ref)} - seen
            seen |= more
            for index in more:
                heapq.heappush(waiting, -index)


def _between(record: StepRecord, told: int, behind: set[int]) -> list[Event]:
    """The events, of those behind a result, that an earlier one of them leads to."""
    reached, found = {told}, list[Event]()
    for index in sorted(event for event in behind if event > told):
        event = record.event(index)
        if isinstance(event, (GlueOp, RootCall)) and any(ref.event in reached for ref in refs_of(event)):
            reached.add(index)
            found.append(event)
    return found


def _may_clean(event: Event) -> bool:
    func = getattr(event, "func", None)
    name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
    return name in CLEANING or name.removesuffix("_") in CLEANING


def calls_behind(bad: BadResult) -> frozenset[int]:
    """The root calls, by the number of their event, that a bad loss or output was made from, the latest of many; the one that
    spoilt a buffer."""
    if bad.kind == "buffer":  # it is looked at as the call returns
        return frozenset([e.index for e in bad.record.events if isinstance(e, RootCall)][-1:])
    if bad.kind not in ("loss", "output"):
        return frozenset()
    found = list[int]()
    starts = list({t.event for t in bad.targets if isinstance(t, Ref)})
    for passed, event in enumerate(_backwards(bad.record, starts, lambda ref: True)):
        if isinstance(event, RootCall):
            found.append(event.index)
        if len(found) == MOST_CALLS or passed == MOST_EVENTS:
            break
    return frozenset(found)
