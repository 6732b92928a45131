"""Where an operand comes from: the operators before it in the trace, looking through views and casts."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ampguard import numerics
from ampguard.replay.trace import Trace, TracedOp

LOOK_THROUGH = frozenset({
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze",
    "clone", "contiguous", "alias", "detach", "_to_copy", "slice", "select", "split", "unbind",
    "chunk", "unflatten", "flatten", "narrow", "lift_fresh", "as_strided", "diagonal",
})  # fmt: skip
"""Operators that pass values on: views, copies and casts."""

MOST_OF_DATA = 64

APART = 8
"""Operators between the parts of one composed call, at most."""


def maker(trace: Trace, op: TracedOp, operand: int) -> TracedOp | None:
    """The operator that made an operand of `op`, looking through views and casts."""
    if operand >= len(op.inputs):
        return None
    made = op.inputs[operand].made_by
    for _ in range(16):
        if made is None:
            return None
        producer = trace.ops[made[0]]
        if producer.short_name in LOOK_THROUGH and producer.inputs:
            made = producer.inputs[0].made_by
            continue
        return producer
    return None


def is_of_data_alone(trace: Trace, op: TracedOp, operand: int, weights: Collection[int]) -> bool:
    """Whether an operand was computed from none of these weights (by their memory). What took many operators is no data."""
    seen: set[int] = set()
    waiting = [op.inputs[operand]] if operand < len(op.inputs) else []
    if not waiting:
        return False
    while waiting:
        tensor = waiting.pop()
        if tensor.made_by is not None and tensor.made_by[0] not in seen:
            seen.add(tensor.made_by[0])
            waiting += trace.ops[tensor.made_by[0]].inputs
        if len(seen) > MOST_OF_DATA or tensor.storage in weights:
            return False
    return True


def reads_any(trace: Trace, op: TracedOp, weights: Collection[int]) -> bool:
    """Whether an operand is one of these weights (by their memory), or a view or a cast of one."""
    for given in op.inputs:
        for _ in range(16):
            if given.storage in weights:
                return True
            producer = trace.ops[given.made_by[0]] if given.made_by is not None else None
            if producer is None or producer.short_name not in LOOK_THROUGH or not producer.inputs:
                break
            given = producer.inputs[0]
    return False


def logdet_around(trace: Trace, constant: TracedOp) -> tuple[TracedOp, TracedOp] | None:
    """(the `where`, the `slogdet`) of the `torch.logdet` that made this constant for a negative determinant; None of others."""
    if constant.short_name != "scalar_tensor":
        return None
    ops, at = trace.ops, constant.index
    later = (op for op in ops[at + 1 : at + APART] if op.short_name == "where")
    chosen = next((op for op in later if any(t.made_by == (at, 0) for t in op.inputs)), None)
    before = reversed(ops[max(0, at - APART) : at])
    determinant = next((o for o in before if o.short_name == "_linalg_slogdet" and o.line == constant.line), None)
    return (chosen, determinant) if chosen is not None and determinant is not None else None


def undone_float(trace: Trace, op: TracedOp) -> bool:
    """Whether an operand was made float32 by the code (`.float()`) and cast back for this operator, within its line.

    Of two lines, the script's own cast (`.type_as(x)`) may stand in the other.
    """
    for tensor in op.inputs:
        made = tensor.made_by
        for _ in range(12):
            if made is None:
                break
            maker = trace.ops[made[0]]
            if maker.short_name == "_to_copy" and maker.line == op.line and _gives_low(maker):
                source = maker.inputs[0] if maker.inputs else None
                if source is not None and source.dtype == torch.float32 and _was_widened(trace, source.made_by):
                    return True
            if maker.short_name not in LOOK_THROUGH or not maker.inputs:
                break
            made = maker.inputs[0].made_by
    return False


def _gives_low(op: TracedOp) -> bool:
    return numerics.is_low_precision(op.outputs[0].dtype)


def _was_widened(trace: Trace, made: tuple[int, int] | None) -> bool:
    """Whether a float32 value goes back, through arithmetic in float32, to a cast from low precision."""
    frontier: list[tuple[int, int] | None] = [made]
    seen: set[tuple[int, int]] = set()
    while frontier and len(seen) < 64:
        place = frontier.pop()
        if place is None or place in seen:
            continue
        seen.add(place)
        maker = trace.ops[place[0]]
        if maker.short_name == "_to_copy" and maker.inputs and numerics.is_low_precision(maker.inputs[0].dtype):
            return maker.outputs[0].dtype == torch.float32
        frontier += [t.made_by for t in maker.inputs if t.dtype == torch.float32]
    return False
