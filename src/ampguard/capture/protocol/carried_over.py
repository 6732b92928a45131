"""Sums of gradients that a script keeps from one iteration to the next while they are still scaled.

`ema[n] = 0.98 * ema[n] + 0.02 * p.grad`, and `p.grad += ema[n]` before the scaler divides: as long as the scale stays as it is,
nothing is wrong. Once it has changed, what was kept carries another scale than what is added to it; and what an overflow
has left in it, the scaler's skipped step does not take out again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampguard.capture.protocol.gradients import SMALL, OptimizerWatch
from ampguard.capture.protocol.powers import DIFFERENCES, KEEPS, OVER, TIMES
from ampguard.capture.record import Line

ADDS = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__", "lerp_", "sub_", "__isub__"}) | DIFFERENCES
PASSES = TIMES | OVER | KEEPS | {"copy_"}


@dataclass(frozen=True, slots=True)
class Sum:
    """Of gradients of this window and of what was kept at a `scale`; `where` they were added. `held`: its memory."""

    scale: float
    where: Line | None
    held: Tensor


@dataclass(slots=True)
class CarriedOver:
    """What earlier windows have left, as it is followed through one window."""

    left: dict[int, tuple[weakref.ref[Tensor], float]] = field(default_factory=dict)
    """By identity: what was made of it alone, and the scale that it carries."""
    sums: dict[int, Sum] = field(default_factory=dict)
    """By memory."""

    @property
    def is_open(self) -> bool:
        return bool(self.left or self.sums)

    def leave(self, tensor: Tensor, scale: float) -> None:
        """It was kept in an earlier window, when the scale was this one."""
        if tensor.numel() <= SMALL:
            self.left[id(tensor)] = weakref.ref(tensor), scale

    def follow(
        self,
        name: str,
        args: tuple[Any, ...],
        target: Tensor,
        is_scaled: Callable[[Any], bool],
        where: Callable[[], Line | None],
    ) -> None:
        """`name(*args)` has made `target`, or written to it. `is_scaled`: whether something carries the present scale."""
        operands = [arg for arg in args[:3] if isinstance(arg, Tensor)]
        kept = next((scale for operand in operands if (scale := self._scale_of(operand)) is not None), None)
        known = next((found for operand in operands if (found := self.sum_in(operand)) is not None), None)
        if known is None and kept is not None and name in ADDS and any(map(is_scaled, operands)):
            known = Sum(kept, where(), target.detach())
        if name not in ADDS and name not in PASSES:
            return
        if known is not None:
            self.left.pop(id(target), None)
            self.sums[target.data_ptr()] = Sum(known.scale, known.where, target.detach())
        elif kept is not None:
            self.left[id(target)] = weakref.ref(target), kept

    def _scale_of(self, tensor: Tensor) -> float | None:
        ref, scale = self.left.get(id(tensor), (None, None))
        return scale if ref is not None and ref() is tensor else None

    def sum_in(self, tensor: Tensor | None) -> Sum | None:
        """The sum that it is all of."""
        found = self.sums.get(tensor.data_ptr()) if tensor is not None and self.sums else None
        return found if found is not None and tensor is not None and found.held.numel() == tensor.numel() else None

    def in_gradients(self, watches: Iterable[OptimizerWatch]) -> tuple[OptimizerWatch, list[Tensor], Sum] | None:
        """Whose gradients are such sums, and which of them."""
        for watch in watches if self.sums else ():
            found = [(p, each) for p in watch.sample if (each := self.sum_in(p.grad)) is not None]
            if found:
                return watch, [p for p, _ in found], found[0][1]
        return None


def became_bad(parameters: Iterable[Tensor], left_by_backward: Callable[[Tensor], list[Tensor]]) -> bool | None:
    """Whether gradients are not finite although what the backward pass has left is; None where that is not known, because what
    it has left is not finite either. Waits for the device."""
    bad = [p for p in parameters if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
    if not bad:
        return False
    left = [left_by_backward(p) for p in bad]
    return True if any(each and all(bool(g.isfinite().all()) for g in each) for each in left) else None


__all__ = ["CarriedOver", "Sum", "became_bad"]
