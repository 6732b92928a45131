"""What an extremum chose by its place, where the value that it found there is not finite.

A code book's distances leave float16's range, and `argmax` picks the code that is furthest away: what is computed from that
code is finite for a while. No bad value leads from there to the distances, but the choice does.
"""

from __future__ import annotations

from ampguard.numerics import NAN, NEG_INF, POS_INF
from ampguard.replay.trace import Trace, TracedOp

Place = tuple[TracedOp, int, int, int]
"""An operator, which of its results, which element of that, and of which kind it is."""

LARGEST, SMALLEST = frozenset({"argmax", "max", "topk", "cummax"}), frozenset({"argmin", "min", "cummin"})
"""Operators that tell where an extreme value lies. Of these a NaN is always one (PyTorch's documentation of `torch.max`)."""


def chosen_before(trace: Trace, head: TracedOp) -> tuple[TracedOp, Place] | None:
    """The first value that is not finite and was an extreme one, and who looked for that, where the head computes with what
    its place chose.

    An infinity that forbids (a mask's -Inf beside a maximum) is none: it is never chosen.
    """
    wanted = [made[0] for tensor in head.inputs if (made := tensor.made_by) is not None]
    seen: set[int] = set()
    found: tuple[TracedOp, Place] | None = None
    while wanted:
        index = wanted.pop()
        if index in seen:
            continue
        seen.add(index)
        op = trace.ops[index]
        place = _extreme(trace, op)
        if place is not None and (found is None or op.index < found[0].index):
            found = op, place
        wanted += [made[0] for tensor in op.inputs if (made := tensor.made_by) is not None]
    return found


def bad_choices(trace: Trace) -> list[TracedOp]:
    """Everything of the forward pass that chose by the place of a value that is not finite."""
    return [op for op in trace.ops if not op.in_backward and _extreme(trace, op) is not None]


def looks_for_smallest(op: TracedOp) -> bool:
    return op.short_name in SMALLEST or (op.short_name == "topk" and False in op.plain[3:4])


def _extreme(trace: Trace, op: TracedOp) -> Place | None:
    """A value among which this operator looked for an extreme one, and that must have been it."""
    if (
        op.short_name not in LARGEST | SMALLEST
        or not op.inputs
        or all(out.dtype.is_floating_point for out in op.outputs)
    ):
        return None
    made = op.inputs[0].made_by
    bad = trace.ops[made[0]].outputs[made[1]].bad if made is not None else None
    if made is None or bad is None:
        return None
    for kind in (NAN, NEG_INF if looks_for_smallest(op) else POS_INF):
        hits = (bad.kinds == kind).nonzero()
        if hits.numel():
            return trace.ops[made[0]], made[1], int(bad.flat[int(hits[0])]), kind
    return None
