"""An update that the script makes by itself, computed once more from what was recorded of it: as it was, and in float32.

What writes to the weight is looked for among the recorded operators, and only what that needs is computed, on copies.
Where the weight was given new data instead (`p.data = p - rate * p.grad`), it is the operator that gives just the values
which the weight has now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.glue.preprocessing import only_moves
from ampguard.capture.record import GlueOp, Held, Line, Ref
from ampguard.capture.sampling.hand_updates import HandUpdate
from ampguard.numerics import is_low_precision

OVERWRITES = frozenset({"aten.copy_.default", "aten.zero_.default", "aten.fill_.Scalar", "aten.fill_.Tensor"})
"""Operators that write to a tensor whatever it held before."""

VIEWS = frozenset({"aten.detach.default", "aten.alias.default", "aten.view.default", "aten.lift_fresh.default"})
"""Operators whose result is all of their operand."""


@dataclass(frozen=True, slots=True)
class Again:
    """The elements of a weight before the update, and after the same update in float32. `line` is the script's."""

    before: Tensor
    after: Tensor
    line: Line | None


class CannotTellError(Exception):
    """What the update is computed from was not recorded."""


def again_in_float32(update: HandUpdate, weight: Tensor, elements: Tensor) -> Again | None:
    """These elements (flat positions) of a weight by the same update in float32.

    None where the update cannot be computed once more, bit for bit, from what was recorded, and where the new values do
    not come from the weight's own old ones (a copy of float32 weights that are kept beside it).
    """
    values = update.values_of(weight)
    if values is None:
        return None
    known, now, _ = values
    with torch.no_grad(), compat.unseen():
        for event, position in _places(update, weight):
            try:
                as_it_was, wide = _Values(update, weight, False), _Values(update, weight, True)
                if not torch.equal(as_it_was.result(event, position), now) or not as_it_was.reads_weight:
                    continue
                after = wide.result(event, position)
            except Exception:  # an operator refuses, or something is gone: nothing can be said
                continue
            before = known.float().reshape(-1)[elements]
            return Again(before, after.float().reshape(-1)[elements], event.line)
    return None


def _places(update: HandUpdate, weight: Tensor) -> list[tuple[GlueOp, int]]:
    """Operators that may have given the weight its new values, the likeliest first; which result, or operand if in place."""
    by_index = {event.index: event for event in update.events}
    written = [
        (event, position)
        for event in reversed(update.events)
        for position, operand in enumerate(_written(event))
        if _is_of(operand, weight, by_index, update)
    ]
    made = [
        (event, 0)
        for event in reversed(update.events)
        if not compat.positions_written(event.func) and event.floating == [True] and not only_moves(event)
    ]
    return written or made


def _written(event: GlueOp) -> list[Any]:
    """What an operator writes to, one after the other."""
    operands = [event.args[i] for i in sorted(compat.positions_written(event.func)) if i < len(event.args)]
    return [inner for operand in operands for inner in (operand if isinstance(operand, (list, tuple)) else [operand])]


def _is_of(operand: Any, weight: Tensor, by_index: dict[int, GlueOp], update: HandUpdate) -> bool:
    """Whether an operand is the weight itself, perhaps by another name."""
    while isinstance(operand, Ref):
        event = by_index.get(operand.event)
        if event is None:
            return update.names.get(operand) is weight
        if compat.positions_written(event.func):
            written = _written(event)
            operand = written[operand.output] if operand.output < len(written) else None
        elif str(event.func) in VIEWS:
            operand = event.args[0]
        else:
            return False
    known = update.value_before(operand) if isinstance(operand, Held) else None
    return known is not None and known[0] is weight


class _Values:
    """What the recorded operators gave, computed as it is asked for."""

    def __init__(self, update: HandUpdate, weight: Tensor, is_wide: bool) -> None:
        self.reads_weight = False
        self._update = update
        self._weight = weight
        self._is_wide = is_wide
        self._events = {event.index: event for event in update.events}
        self._made: dict[int, list[Any]] = {}

    def result(self, event: GlueOp, position: int) -> Tensor:
        value = self._run(event)[position]
        if not isinstance(value, Tensor):
            raise CannotTellError
        return value

    def _run(self, event: GlueOp) -> list[Any]:
        """The results of an operator; of one in place, what it wrote to."""
        known = self._made.get(event.index)
        if known is not None:
            return known
        if event.rng is not None or torch.Tag.nondeterministic_seeded in event.func.tags:
            raise CannotTellError  # the script's random numbers are its own
        positions = compat.positions_written(event.func)
        overwrites = str(event.func) in OVERWRITES
        args = [self._value(a, is_read=not (overwrites and i in positions)) for i, a in enumerate(event.args)]
        kwargs = {name: self._value(value) for name, value in event.kwargs.items()}
        output = event.func(*args, **kwargs)
        if positions:
            written = [args[i] for i in sorted(positions) if i < len(args)]
            made = [inner for one in written for inner in (one if isinstance(one, list) else [one])]
        else:
            made = list(output) if isinstance(output, (tuple, list)) else [output]
        self._made[event.index] = made
        return made

    def _value(self, operand: Any, is_read: bool = True) -> Any:
        if isinstance(operand, (list, tuple)):
            return [self._value(inner, is_read) for inner in operand]
        if isinstance(operand, Ref):
            return self._of_ref(operand, is_read)
        if isinstance(operand, Held):
            return self._given(operand, is_read)
        if isinstance(operand, torch.dtype) and self._is_wide and is_low_precision(operand):
            return torch.float32
        return operand

    def _of_ref(self, ref: Ref, is_read: bool) -> Tensor:
        event = self._events.get(ref.event)
        if event is not None:
            return self.result(event, ref.output)
        gradient = self._update.gradient_of(ref)
        return self._given(ref, is_read) if gradient is None else self._widened(gradient)

    def _given(self, operand: Ref | Held, is_read: bool) -> Tensor:
        """What no operator of the update has made."""
        known = self._update.value_before(operand)
        if known is not None:
            self.reads_weight = self.reads_weight or (is_read and known[0] is self._weight)
            return self._widened(known[1])
        if isinstance(operand, Ref) or not operand.is_intact:
            raise CannotTellError
        return self._widened(operand.value)

    def _widened(self, value: Tensor) -> Tensor:
        is_low = self._is_wide and is_low_precision(value.dtype)
        return value.detach().to(torch.float32) if is_low else value.detach().clone()
