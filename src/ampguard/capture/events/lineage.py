"""Questions about where a recorded value comes from. They are asked only when something looks wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.events.operands import held_by, refs_in, refs_of
from ampguard.capture.record import BackwardCall, BadResult, Event, GlueOp, Ref, RootCall, StepRecord
from ampguard.numerics import is_finite


def ancestors(record: StepRecord, ref: Ref) -> set[int]:
    """The event that made a tensor, and those that its only changes in form came from."""
    found = {ref.event}
    event = record.event(ref.event)
    while isinstance(event, GlueOp) and (refs := refs_in(event.args)) and len(refs) == 1:
        found.add(refs[0].event)
        event = record.event(refs[0].event)
    return found


def comes_from_a_root(record: StepRecord, ref: Ref) -> bool:
    """Whether floating-point values lead from a root call to this tensor (a count or an accuracy has none)."""
    return any(isinstance(event, RootCall) and not event.is_function for event in _way_back(record, ref))


CONTRACTIONS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "mv", "matmul", "__matmul__", "__rmatmul__", "einsum", "linear", "embedding"}
    | {"convolution", "conv1d", "conv2d", "conv3d"}
)
"""By what a model computes with its weights, and hardly any figure of the weights themselves (a norm, a ratio); the operators,
and the functions that are kept as calls."""


def comes_from_weights(record: StepRecord, ref: Ref) -> bool:
    """Whether a model without modules made it: data were multiplied by tensors that want a gradient, and lie in the script."""
    has_weights = has_contraction = False
    for event in _way_back(record, ref):
        if isinstance(event, GlueOp):
            has_contraction |= (
                getattr(getattr(event.func, "overloadpacket", event.func), "__name__", "") in CONTRACTIONS
            )
            has_weights |= any(held.tensor.requires_grad and held.tensor.is_leaf for held in held_by(event))
    return has_weights and has_contraction


def given_to(record: StepRecord, ref: Ref) -> Iterator[Tensor]:
    """The tensors that no recorded event made among those that this one was computed from, back to calls of modules."""
    for event in _way_back(record, ref):
        yield from (held.tensor for held in held_by(event))


def bad_operands(record: StepRecord, event: Event | None) -> tuple[Ref, ...]:
    """What an operator outside modules was given that is not finite now: who made it, or the operator itself where the script
    holds it. The status of a factorization stands for its result."""
    if not isinstance(event, GlueOp):
        return ()
    makers = ((ref, record.event(ref.event)) for ref in refs_of(event))
    made = [
        (Ref(ref.event, output), result())
        for ref, maker in makers
        for output, result in enumerate(maker.outputs if maker is not None else ())
        if output == ref.output or not is_float(record, ref)
    ]
    own = [(Ref(event.index, 0), held.tensor) for held in held_by(event)]
    return tuple(
        dict.fromkeys(
            ref for ref, t in (*made, *own) if t is not None and compat.has_values(t) and not is_finite(t.detach())
        )
    )


def _way_back(record: StepRecord, ref: Ref) -> Iterator[Event]:
    """The event that made a tensor and those from which floating-point values lead to it, back to calls of modules."""
    seen: set[int] = set()
    stack = [ref.event]
    while stack:
        index = stack.pop()
        event = record.event(index)
        if index in seen or event is None:
            continue
        seen.add(index)
        yield event
        if isinstance(event, GlueOp) or (isinstance(event, RootCall) and event.is_function):
            stack.extend(r.event for r in refs_of(event) if is_float(record, r))
            stack.extend(record.writers.get(index, ()))  # rows that were written into it


def is_of_training_calls(record: StepRecord, ref: Ref) -> bool:
    """Whether a number was computed, without gradients, from calls of modules that train and were made with gradients."""
    events = (record.event(index) for index in events_behind(record, ref.event))
    roots = [event for event in events if isinstance(event, RootCall) and not event.is_function]
    return bool(roots) and all(root.modes.grad and root.training for root in roots)


def is_figure_beside(record: StepRecord, ref: Ref) -> bool:
    """Whether a number went bad on a way of its own, beside differentiated losses that it shares its roots with.

    A perplexity that is only logged, say. Not a loss whose NaN was taken out before it was differentiated.
    """
    calls = [event for event in record.events if isinstance(event, BackwardCall)]
    losses = {r.event for call in calls if not (call.create_graph or call.outputs) for r in refs_in(call.args[0])}
    behind = events_behind(record, ref.event)
    shared = set[int]().union(*(events_behind(record, loss) for loss in losses))
    if ref.event in shared or any(isinstance(record.event(i), RootCall) for i in behind - shared):
        return False
    common = [event for i in behind & shared if (event := record.event(i)) is not None]
    live = [tensor for event in common for output in event.outputs if (tensor := output()) is not None]
    return all(is_finite(tensor.detach()) for tensor in live)


def is_of_calls_before(record: StepRecord, ref: Ref, until: int) -> bool:
    """Whether a number was computed from module calls, and all of them are older than this (and were differentiated)."""
    calls = [index for index in events_behind(record, ref.event) if isinstance(record.event(index), RootCall)]
    return bool(calls) and max(calls) < until


def events_behind(record: StepRecord, index: int) -> set[int]:
    """An event and those that floating-point values lead from to it."""
    found: set[int] = set()
    stack = [index]
    while stack:
        index = stack.pop()
        event = record.event(index)
        if index not in found and isinstance(event, (GlueOp, RootCall)):
            found.add(index)
            stack.extend(r.event for r in refs_of(event) if is_float(record, r))
    return found


def events_behind_losses(suspects: Sequence[BadResult]) -> set[int]:
    """Events that training losses under suspicion were made from, by floating-point values."""
    losses = [bad for bad in suspects if bad.kind == "loss" and bad.mode == "train"]
    targets = [(bad.record, target.event) for bad in losses for target in bad.targets if isinstance(target, Ref)]
    return set[int]().union(*(events_behind(record, index) for record, index in targets))


def is_float(record: StepRecord, ref: Ref) -> bool:
    event = record.event(ref.event)
    return event is not None and ref.output < len(event.floating) and event.floating[ref.output]


def was_wanting(record: StepRecord, ref: Ref) -> bool:
    """Whether this tensor was computed with gradients on, from something that wants one."""
    return ref.event in wanting_gradients(record)


def wanting_gradients(record: StepRecord) -> set[int]:
    """Events whose results want a gradient. A number that is computed with gradients on from a result of `no_grad` (the
    mean of a validation output) wants none, nor does what a module made under a `no_grad` of its own."""
    found: set[int] = set()
    for event in record.events:
        if isinstance(event, RootCall):
            wants = event.modes.grad and (event.wants_gradient or event.is_function)
        else:
            wants = event.grad and (
                any(held.tensor.requires_grad for held in held_by(event))
                or any(ref.event in found for ref in refs_of(event))
            )
        if wants:
            found.add(event.index)
    return found


def has_graph(event: Event) -> bool:
    """Whether any of its results that are still there can be differentiated; weights that were written to cannot."""
    return any((tensor := ref()) is not None and tensor.grad_fn is not None for ref in event.outputs)


def events_behind_gradients(record: StepRecord) -> set[int]:
    """Events from which a result that wants a gradient was made."""
    wanting = wanting_gradients(record)
    reached: set[int] = set()
    for event in reversed(record.events):
        if event.index in reached or event.index in wanting:
            reached |= {ref.event for ref in refs_of(event)}
    return reached


def nonfinite_number_behind(record: StepRecord, ref: Ref) -> Ref | None:
    """The non-finite number behind a yes or no (`torch.isnan(loss)`), if it is still there."""
    stack, seen = [ref], set[int]()
    while stack and len(seen) < 16:
        current = stack.pop()
        event = record.event(current.event)
        if event is None or current.event in seen:
            continue
        seen.add(current.event)
        tensor = event.outputs[current.output]() if current.output < len(event.outputs) else None
        if tensor is not None and tensor.is_floating_point():
            if tensor.numel() == 1 and not is_finite(tensor):
                return current
            continue
        if isinstance(event, GlueOp):
            stack += refs_of(event)
    return None


def bad_numbers(record: StepRecord) -> set[int]:
    """The events that have made a number which is not finite."""
    made = ((event.index, ref()) for event in record.events for ref in event.outputs)
    return {index for index, tensor in made if tensor is not None and _is_bad_figure(tensor)}


def rests_on_a_figure(record: StepRecord, ref: Ref, told: Set[int] = frozenset()) -> bool:
    """Whether a number that the step was given, and that was bad already, is part of what this one was computed from.

    (What a script counts on from step to step: a sum of losses, their running mean.) `told`: events that have made such
    numbers, and that need not be in the record any more.
    """
    stack, seen = [ref.event], set[int]()
    while stack:
        event = record.event(stack.pop())
        if not isinstance(event, GlueOp) or event.index in seen:
            continue
        seen.add(event.index)
        if any(_is_bad_figure(held.tensor) for held in held_by(event)) or any(r.event in told for r in refs_of(event)):
            return True
        stack += [r.event for r in refs_of(event) if is_float(record, r) and _may_be_bad(record, r)]
    return False


def _is_bad_figure(tensor: Tensor) -> bool:
    is_number = tensor.numel() == 1 and tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)
    return is_number and not is_finite(tensor.detach())


def _may_be_bad(record: StepRecord, ref: Ref) -> bool:
    event = record.event(ref.event)
    tensor = event.outputs[ref.output]() if event is not None and ref.output < len(event.outputs) else None
    return tensor is None or not is_finite(tensor.detach())


def root_of(bad: BadResult) -> RootCall | None:
    """The root call that returned a bad result, where one did."""
    for target in bad.targets:
        if isinstance(target, Ref):
            event = bad.record.event(target.event)
            if isinstance(event, RootCall):
                return event
    return None
