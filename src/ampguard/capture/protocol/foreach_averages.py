"""Averages that one operator writes for all weights: `torch._foreach_lerp_(shadow, weights, 0.001)`, and `AveragedModel`'s.

Such an operator returns nothing, and what its operands held before it is not kept. So it is asked what one more of the same
would do to an average as it stands: in its own precision, and in float32. Only a few of a list are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.remade_averages import RemadeAverage
from ampguard.capture.record import BackwardCall, GlueOp, Held, Ref, RootCall, StepRecord
from ampguard.numerics import is_low_precision

DEEPEST = 8

Memory = tuple[int, torch.Size]


class CannotTellError(Exception):
    """What was written comes from elsewhere."""


def foreach_averages(
    record: StepRecord, trained: Iterable[Tensor], held: Callable[[], Iterable[Tensor]], largest: int, most: int
) -> list[RemadeAverage]:
    """Those that were written since the last call of a module or backward pass. No optimizer `held` them."""
    latest = max((e.index for e in record.events if isinstance(e, (BackwardCall, RootCall))), default=-1)
    events = {e.index: e for e in record.events if isinstance(e, GlueOp) and e.index > latest}
    writes = [e for e in events.values() if _is_over_lists(e) and compat.positions_written(e.func) == {0}]
    if not writes:
        return []
    weights = {key: p for p in trained if (key := compat.storage_key(p))}
    own = {compat.storage_key(p) for p in held()}
    return list(islice(_found(events, writes, weights, own, largest), most))


def _found(
    events: dict[int, GlueOp], writes: list[GlueOp], weights: dict[int, Tensor], own: set[int], largest: int
) -> Iterator[RemadeAverage]:
    last = writes[-1]
    for position, operand in enumerate(last.args[0]):
        average = _tensor_behind(operand, events)
        if average is None or not is_low_precision(average.dtype) or average.numel() > largest:
            continue
        if compat.storage_key(average) in own:
            continue
        narrow, wide = (_OneMore(events, weights, average, dtype) for dtype in (average.dtype, torch.float32))
        try:
            for write in writes:
                if len(write.args[0]) == len(last.args[0]):
                    narrow.write(write, position)
                    wide.write(write, position)
        except Exception:  # an operator refuses, or something is gone: nothing can be said
            continue
        if len(narrow.weights) == 1:
            (weight,) = narrow.weights.values()
            yield RemadeAverage(weight, average.detach(), narrow.value, wide.value, last)


class _OneMore:
    """The same writes once more to an average as it stands, computed in `dtype`."""

    def __init__(
        self, events: dict[int, GlueOp], weights: dict[int, Tensor], average: Tensor, dtype: torch.dtype
    ) -> None:
        self.value = average.detach().to(dtype, copy=True)
        self.weights: dict[int, Tensor] = {}
        """Trained weights that were read."""
        self._events = events
        self._all_weights = weights
        self._average = _memory(average)
        self._is_wide = dtype != average.dtype

    def write(self, event: GlueOp, position: int) -> None:
        target = _tensor_behind(event.args[0][position], self._events)
        if target is not None and _memory(target) == self._average:
            self._run(event, position, 0)

    def _run(self, event: GlueOp, position: int, depth: int) -> Any:
        """What an operator gives; of one over lists, for what stands at this position in each of them."""
        if depth > DEEPEST or event.rng is not None or (depth and compat.positions_written(event.func)):
            raise CannotTellError
        over_lists = _is_over_lists(event)

        def given(operand: Any) -> Any:
            if isinstance(operand, (list, tuple)):
                return [self._of(operand[position], depth)] if over_lists else [self._of(o, depth) for o in operand]
            return self._of(operand, depth)

        return event.func(*map(given, event.args), **{name: given(value) for name, value in event.kwargs.items()})

    def _of(self, operand: Any, depth: int) -> Any:
        if isinstance(operand, Held):
            return self._held(operand)
        if isinstance(operand, torch.dtype) and self._is_wide and is_low_precision(operand):
            return torch.float32
        if not isinstance(operand, Ref):
            return operand
        tensor = _tensor_behind(operand, self._events)
        if tensor is not None and _memory(tensor) == self._average:
            return self.value
        event = self._events[operand.event]
        made = self._run(event, operand.output, depth + 1)
        if _is_over_lists(event):
            return made[0]
        return made[operand.output] if isinstance(made, (list, tuple)) else made

    def _held(self, operand: Held) -> Tensor:
        if _memory(operand.tensor) == self._average:
            return self.value
        if not operand.is_intact:
            raise CannotTellError
        key = compat.storage_key(operand.tensor)
        if key in self._all_weights:
            self.weights[key] = self._all_weights[key]
        value = operand.value.detach()
        return value.float() if self._is_wide and is_low_precision(value.dtype) else value.clone()


def _tensor_behind(operand: Any, events: dict[int, GlueOp]) -> Tensor | None:
    """The tensor that is given, also through views of it (`.detach()`, `.data`)."""
    for _ in range(DEEPEST):
        event = events.get(operand.event) if isinstance(operand, Ref) else None
        if event is None or not compat.is_view(event.func) or not event.args:
            break
        operand = event.args[0]
    return operand.tensor if isinstance(operand, Held) else None


def _is_over_lists(event: GlueOp) -> bool:
    return str(event.func).startswith("aten._foreach_")


def _memory(tensor: Tensor) -> Memory:
    return compat.storage_key(tensor), tensor.shape
