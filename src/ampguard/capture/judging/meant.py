"""Values that are not finite because the script itself has written them: a table full of NaN, a best loss of Inf."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from ampguard.capture.events.operands import held_by, leaves, refs_of
from ampguard.capture.flags import is_immediate
from ampguard.capture.glue.preprocessing import MOVES
from ampguard.capture.record import Event, GlueOp, Ref, RootCall, StepRecord
from ampguard.compat import version_of
from ampguard.numerics import is_finite

MOST_EVENTS = 64
"""Operators that are gone back through."""

_PUTS_TOGETHER = MOVES | {
    "copy_",
    "fmax",
    "fmin",
    "index_put",
    "index_put_",
    "masked_scatter",
    "maximum",
    "minimum",
    "scatter",
    "slice_scatter",
    "where",
}
"""Operators whose results hold nothing but values of their operands: unlike arithmetic, they make none bad."""


_FILLS = frozenset({"fill_", "full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zero_", "zeros_like"})
"""Operators whose results hold nothing of their operands: those of no tensors at all do so too."""


def holds_no_operand(event: Event) -> bool:
    """Whether the result of an operator holds nothing of its operands."""
    return isinstance(event, GlueOp) and _name(event) in _FILLS


def is_own_constant(record: StepRecord, ref: Ref, writers: Mapping[int, Sequence[int]]) -> bool:
    """Whether all that is not finite in a result was written as such: `torch.full((3,), nan)`, `x.masked_fill(m, nan)`.

    `writers` names, for an event, those that wrote to its result in place.
    """
    waiting, seen, has_constant = [ref.event], set[int](), False
    while waiting and len(seen) < MOST_EVENTS:
        event = record.event(waiting.pop())
        if not isinstance(event, GlueOp) or event.index in seen:
            continue  # (a module's result that is still there was asked; of one that is gone, its own call has told)
        seen.add(event.index)
        waiting += writers.get(event.index, ())
        if any(_is_constant(value) for value in leaves((event.args, event.kwargs))):
            has_constant = True
        elif holds_no_operand(event) or not (refs_of(event) or held_by(event)):
            continue
        elif _name(event) not in _PUTS_TOGETHER:
            return False
        has_constant = has_constant or any(_is_lasting_constant(held.tensor) for held in held_by(event))
        if any(_is_bad(held.tensor) and not _is_lasting_constant(held.tensor) for held in held_by(event)):
            return False
        behind = [ref for ref in refs_of(event) if not _is_known_good(record, ref)]
        if any(isinstance(record.event(ref.event), RootCall) and _tensor(record, ref) is not None for ref in behind):
            return False
        waiting += [ref.event for ref in behind]
    return has_constant


def _is_constant(value: object) -> bool:
    return type(value) is float and not math.isfinite(value)


def _is_lasting_constant(tensor: Tensor) -> bool:
    """`torch.tensor(float("nan"))`, made before anything was recorded."""
    return tensor.dim() == 0 and not tensor.requires_grad and version_of(tensor) == 0 and _is_bad(tensor)


def _is_bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and is_immediate(tensor) and not is_finite(tensor)


def _is_known_good(record: StepRecord, ref: Ref) -> bool:
    """Whether an operand is no floating number, or still there and finite."""
    event = record.event(ref.event)
    if event is not None and ref.output < len(event.floating) and not event.floating[ref.output]:
        return True
    tensor = _tensor(record, ref)
    return tensor is not None and is_immediate(tensor) and is_finite(tensor)


def _tensor(record: StepRecord, ref: Ref) -> Tensor | None:
    event = record.event(ref.event)
    return event.outputs[ref.output]() if event is not None and ref.output < len(event.outputs) else None


def _name(event: GlueOp) -> str:
    return getattr(getattr(event.func, "overloadpacket", event.func), "__name__", "")
