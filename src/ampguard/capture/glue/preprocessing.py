"""What a script computes before the first module of a step: is any of it worth taping?

Batches that are only sliced, joined, converted and moved to a device cannot become non-finite there: a bad value was in
the data. Arithmetic can, and so can a conversion to a narrower type. And what a step differentiates by (the coordinates of a
physics-informed network) has to be joined in its replay as well: the derivative goes through that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ampguard.capture.events.operands import held_by, held_in, leaves, refs_in, refs_of
from ampguard.capture.record import BackwardCall, Event, GlueOp, Ref, RootCall

NO_WRITERS: Mapping[int, Sequence[int]] = MappingProxyType({})

MOVES = frozenset({
    "__get__", "__getitem__", "_to_copy", "_unsafe_view", "alias", "as_strided", "atleast_1d", "atleast_2d",
    "atleast_3d", "broadcast_to", "cat", "chunk", "clone", "concat", "concatenate", "contiguous", "cpu", "cuda",
    "detach", "diagonal", "expand", "expand_as", "flatten", "flip", "gather", "index", "index_select", "lift_fresh",
    "long", "movedim", "narrow", "permute", "pin_memory", "ravel", "repeat", "repeat_interleave", "reshape",
    "reshape_as", "roll", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "swapaxes", "swapdims",
    "t", "tile", "to", "transpose", "tril", "triu", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as",
})  # fmt: skip
"""Functions and operators whose results hold nothing but values that they were given."""


def uses_computed(
    events: Sequence[Event], began: int, first_root: int, writers: Mapping[int, Sequence[int]] = NO_WRITERS
) -> bool:
    """Whether any event from `first_root` on was given what those from `began` on had computed, not just moved or drawn.

    `writers` names, for an event, those that wrote to its result in place. What was moved counts where it is differentiated by.
    """
    before = {event.index: event for event in events if began <= event.index < first_root}
    sources = _differentiated_by(event for event in events if event.index >= first_root) if before else frozenset()
    if not sources and all(only_moves(event) for event in before.values()):
        return False
    pending = {ref.event for event in events if event.index >= first_root for ref in refs_of(event)} & before.keys()
    seen: set[int] = set()
    while pending:
        index = pending.pop()
        event = before[index]
        if _computes(event) or not sources.isdisjoint(_operands(event)):
            return True
        seen.add(index)
        behind = {ref.event for ref in refs_of(event)} | set(writers.get(index, ()))
        pending |= (behind & before.keys()) - seen
    return False


def _differentiated_by(events: Iterable[Event]) -> frozenset[Ref | int]:
    """What derivatives are taken for: results of events, and held tensors by identity. Parameters are no part of a batch."""
    inputs = [event.args[2] for event in events if isinstance(event, BackwardCall) and event.is_functional]
    held = (id(h.tensor) for h in held_in(inputs) if not isinstance(h.tensor, nn.Parameter))
    return frozenset([*refs_in(inputs), *held])


def _operands(event: Event) -> list[Ref | int]:
    """What an event was given: results of others, and held tensors by identity."""
    return [*refs_of(event), *(id(held.tensor) for held in held_by(event))]


def _computes(event: Event) -> bool:
    """Whether its results may be bad though all that it was given is not: random numbers and constants are not.

    What a module returns is followed in any case.
    """
    return not isinstance(event, RootCall) and not only_moves(event) and bool(refs_of(event) or held_by(event))


def only_moves(event: Event) -> bool:
    """Whether what an event returned holds no other values than it was given, in no narrower type."""
    if not isinstance(event, GlueOp):
        return False
    func: Any = getattr(event.func, "overloadpacket", event.func)
    if getattr(func, "__name__", "") not in MOVES:
        return False
    given = list(leaves((event.args, event.kwargs)))
    return not any(isinstance(value, (torch.dtype, Tensor)) for value in given)
