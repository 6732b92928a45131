"""Which recorded events a bad result was made from, and whether a replay of them can be the step itself."""

from __future__ import annotations

from collections.abc import Container, Mapping
from types import CodeType

import torch
from torch import Tensor, nn

from ampguard import compat, numerics
from ampguard.capture.events.operands import held_by, refs_of
from ampguard.capture.record import BackwardCall, BadResult, Event, GlueOp, Ref, RootCall, SavedBuffer, StepRecord
from ampguard.numerics import is_finite


def updated_leaves(record: StepRecord, only_finite: bool = False) -> dict[Ref, Tensor]:
    """Weights that the script keeps as plain tensors and updates by itself: as they are since the last update.

    A step begins with them as they are; the updates before it are those of earlier steps. What was computed with gradients
    on and detached then may be no weight: where it is bad, it is asked what made it. With `only_finite` that is asked of every
    one that is bad, and what backward calls returned is given.
    """
    last: dict[int, tuple[Ref, Tensor]] = {}
    hang_in_modules = any(isinstance(event, RootCall) for event in record.events)
    for event in (event for event in record.events if isinstance(event, GlueOp)):
        for position, ref in enumerate(event.outputs):
            tensor = ref()
            if tensor is None or not compat.is_wanting_leaf(tensor):
                continue
            if hang_in_modules and isinstance(tensor, nn.Parameter):
                continue
            if (not event.grad and not only_finite) or is_finite(tensor.detach()):
                last[id(tensor)] = (Ref(event.index, position), tensor)
    return dict(last.values()) | (_returned(record) if only_finite else {})


def _returned(record: StepRecord) -> dict[Ref, Tensor]:
    """What backward calls have returned and the script still holds."""
    calls = [event for event in record.events if isinstance(event, BackwardCall)]
    refs = [(Ref(call.index, position), ref()) for call in calls for position, ref in enumerate(call.outputs)]
    return {name: tensor for name, tensor in refs if tensor is not None}


def has_bad_leaves(record: StepRecord) -> bool:
    """Whether an update of the script's own has made plain weights bad, as far as it was recorded."""
    return any(not is_finite(tensor.detach()) for tensor in updated_leaves(record).values())


def plain_weights(record: StepRecord) -> list[Tensor]:
    """Weights that the script keeps as plain tensors: what the events were given, or made and the script still holds."""
    held = [held.tensor for event in record.events for held in held_by(event)]
    made = [tensor for event in record.events for ref in event.outputs if (tensor := ref()) is not None]
    return [tensor for tensor in (*held, *made) if compat.is_wanting_leaf(tensor)]


def events_behind(
    bad: BadResult, given: Container[Ref] = (), differentiated: Mapping[int, int | None] | None = None
) -> list[Event]:
    """The events that the bad result was made from, in order, with every event that wrote in place to one of them.

    Those are left out that made nothing but what is `given`. Of an event that computes a tangent, the one that is
    `differentiated` by it belongs to them.
    """
    record: StepRecord = bad.record
    wanted: set[int] = set()
    for target in bad.targets:
        if isinstance(target, Ref):
            wanted.add(target.event)
        else:
            wanted |= _poisoning_call(record, target.tensor)
    if bad.is_of_gradients and not wanted:
        wanted = backward_calls(record, bad.since)
    by_index = {event.index: event for event in record.events}
    pending = sorted(wanted)
    while pending:
        event = by_index.get(pending.pop())
        if event is None:
            continue
        if isinstance(event, GlueOp) and any(h.tensor.grad_fn is not None for h in held_by(event)):
            calls = [e for e in record.events if isinstance(e, RootCall) and e.index < event.index]
            pending += [e.index for e in calls if all(ref.event in by_index for ref in refs_of(e))]
            wanted |= set(pending)
        more = {ref.event for ref in refs_of(event) if ref not in given} | set(record.writers.get(event.index, ()))
        of = differentiated.get(event.index) if differentiated else None
        more |= {of} if of is not None else set()
        pending += sorted(more - wanted)
        wanted |= more
    return [event for event in record.events if event.index in wanted]


def _poisoning_call(record: StepRecord, buffer: Tensor) -> set[int]:
    """The call that turned `buffer` non-finite: the last one that began with finite values in it.

    Calls before it only gave it finite values, perhaps with parameters that an optimizer has changed since; those after
    it began with a bad buffer.
    """
    bound = [
        (event.index, saved.value)
        for event in record.events
        if isinstance(event, RootCall)
        for saved in event.attributes
        if saved.owner.get(saved.name) is buffer
    ]
    if bound:
        found_finite = [i for i, value in bound if not isinstance(value, Tensor) or is_finite(value.detach())]
        return set(found_finite[-1:] or bound[-1][:1])
    calls = [
        (event.index, saved)
        for event in record.events
        if isinstance(event, RootCall)
        for saved in event.buffers
        if saved.owner.get(saved.name) is buffer or _stood_there_finite(saved, buffer)
    ]
    began_finite = [index for index, saved in calls if saved.copy is not None and is_finite(saved.copy)]
    return set(began_finite[-1:] or [index for index, _ in calls])


def _stood_there_finite(saved: SavedBuffer, buffer: Tensor) -> bool:
    """Whether `buffer` stood in this place when the call began, finite as yet; another may stand there by now."""
    return saved.tensor is buffer and saved.copy is not None and is_finite(saved.copy)


def forward_code_of_functions() -> frozenset[CodeType]:
    """The code of every custom function's forward pass: where it was taped, its own derivative is not known."""
    found: set[CodeType] = set()
    waiting: list[type] = [torch.autograd.Function]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        code = getattr(kind.__dict__.get("forward"), "__func__", None)
        if code is not None:
            found.add(code.__code__)
    return frozenset(found)


def backward_calls(record: StepRecord, since: int) -> set[int]:
    """The backward passes whose gradients an optimizer is about to use: those since the last update.

    Where there is none, the gradients were put there by hand: from those that `torch.autograd.grad` returned.
    """
    begin = max(record.iteration_start, since)
    every = [e for e in record.events if isinstance(e, BackwardCall) and e.index >= begin and not e.create_graph]
    calls = [call for call in every if not call.is_functional] or every
    latest = max((call.updates_before for call in calls), default=0)
    return {call.index for call in calls if call.updates_before == latest}


def is_computed(tensor: Tensor) -> bool:
    """Whether a tensor that no recorded event made was computed somewhere (inside a module that did not return it)."""
    return tensor.is_floating_point() and (tensor.grad_fn is not None or not numerics.is_finite(tensor))
