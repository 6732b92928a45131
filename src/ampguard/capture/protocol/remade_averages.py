"""Averages of weights that are plain tensors: `mean[name] = 0.999 * mean[name] + 0.001 * weight`, or the same in place.

No module need hold them, and a new tensor may take the old one's place in each step. What was recorded between two steps is
searched for a result of low precision, still there, that was computed from one tensor of its own kind and from one weight
that is trained. The same operators are computed once more on copies, as they ran and in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.events.operands import held_by, refs_of
from ampguard.capture.record import BackwardCall, GlueOp, Held, Ref, RootCall, StepRecord
from ampguard.numerics import is_low_precision

MOST_OPERATORS = 16
"""Behind one result."""


@dataclass(frozen=True, slots=True)
class RemadeAverage:
    """What a step has made of `old` and of the trained weight: as it ran, and in float32."""

    weight: Tensor
    old: Tensor
    now: Tensor
    wide: Tensor
    last: GlueOp


def remade_averages(record: StepRecord, trained: Iterable[Tensor], largest: int, most: int) -> list[RemadeAverage]:
    """Those that were made since the last call of a module or backward pass."""
    weights = {key: p for p in trained if (key := compat.storage_key(p))}
    return list(islice(_found(record, weights, largest), most))


def _found(record: StepRecord, weights: dict[int, Tensor], largest: int) -> Iterator[RemadeAverage]:
    latest = max((e.index for e in record.events if isinstance(e, (BackwardCall, RootCall))), default=-1)
    events = {e.index: e for e in record.events if isinstance(e, GlueOp) and e.index > latest}
    used = {ref.event for event in events.values() for ref in refs_of(event)}
    for index, event in events.items():
        made = event.outputs[0]() if len(event.outputs) == 1 else None
        if index in used or made is None or not is_low_precision(made.dtype) or made.numel() > largest:
            continue
        if isinstance(made, nn.Parameter) or made.requires_grad or compat.storage_key(made) in weights:
            continue
        found = _made_of(event, made, _Sources(events, weights, made))
        if found is not None:
            yield found


class _Sources:
    """What a result was computed from: the tensors behind it that no operator of the stretch has made."""

    def __init__(self, events: dict[int, GlueOp], weights: dict[int, Tensor], made: Tensor) -> None:
        self.events = events
        self.old: dict[int, Tensor] = {}
        self.weights: dict[int, Tensor] = {}
        self.is_clear = True
        """Nothing else went into it but numbers."""
        self._all_weights = weights
        self._made = made

    def follow(self, last: GlueOp) -> None:
        waiting, seen = [last], set[int]()
        while waiting and self.is_clear:
            event = waiting.pop()
            if event.index in seen:
                continue
            seen.add(event.index)
            self.is_clear = len(seen) <= MOST_OPERATORS and event.rng is None
            for held in held_by(event) if self.is_clear else ():
                self.is_clear = self.is_clear and self._add(held)
            inner = [self.events.get(ref.event) for ref in refs_of(event)]
            self.is_clear = self.is_clear and None not in inner
            waiting += [event for event in inner if event is not None]

    def _add(self, held: Held) -> bool:
        tensor, key = held.tensor, compat.storage_key(held.tensor)
        if tensor.numel() == 1 and self._made.numel() > 1:
            return True
        if tensor.shape != self._made.shape or not held.is_intact:
            return False
        if key in self._all_weights:
            self.weights[key] = self._all_weights[key]
            return True
        self.old[key] = held.value
        return tensor.dtype == self._made.dtype


def _made_of(last: GlueOp, made: Tensor, sources: _Sources) -> RemadeAverage | None:
    sources.follow(last)
    if not sources.is_clear or len(sources.old) != 1 or len(sources.weights) != 1:
        return None
    (old,), (weight,) = sources.old.values(), sources.weights.values()
    try:
        narrow, wide = (_again(last, sources.events, dtype) for dtype in (made.dtype, torch.float32))
    except Exception:  # an operator refuses, or something is gone: nothing can be said
        return None
    if narrow.shape != made.shape or not torch.equal(narrow, made):
        return None
    return RemadeAverage(weight, old.detach(), made.detach(), wide, last)


def _again(event: GlueOp, events: dict[int, GlueOp], dtype: torch.dtype) -> Tensor:
    """The result of an operator once more, from copies of what it was given, computed in `dtype`."""

    def value(operand: Any) -> Any:
        if isinstance(operand, (list, tuple)):
            return type(operand)(value(inner) for inner in operand)
        if isinstance(operand, Ref):
            return _again(events[operand.event], events, dtype)
        if isinstance(operand, Held):
            tensor = operand.value.detach()
            return tensor.to(
                torch.float32 if is_low_precision(tensor.dtype) and dtype is torch.float32 else tensor.dtype, copy=True
            )
        return dtype if isinstance(operand, torch.dtype) and is_low_precision(operand) else operand

    result = event.func(*map(value, event.args), **{name: value(inner) for name, inner in event.kwargs.items()})
    if not isinstance(result, Tensor):
        raise TypeError(type(result).__name__)
    return result
