"""Gradients that overflow because of the loss scale alone, had again at a lower one; the scale is lowered after the step.

A scaler skips such a step and halves its scale. Here backward is repeated at the largest power of two at which it is
finite, and the result is multiplied to what the scaler expects: exact, since parameters' gradients are float32.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ampguard import compat
from ampguard.run.overrides.gradients import all_finite
from ampguard.run.overrides.ledger import Ledger
from ampguard.stderr import say

Gradients = list["Tensor | None"]


@runtime_checkable
class Lowerable(Protocol):
    """A loss scale that can be told to fall."""

    def lower(self, halvings: int) -> None: ...


class LowerScale:
    """Finds gradients that are finite, and remembers by how much whose scale has to fall."""

    def __init__(self, ledger: Ledger) -> None:
        self._steps = ledger.at_lower_scale
        self._pending: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def finite_gradients(
        self, losses: Sequence[Tensor], parameters: Sequence[Tensor], owner: object | None, step: int
    ) -> Gradients | None:
        """The gradients of the (scaled) losses, as the scale of `owner` has them. None where no scale makes them finite."""
        found = _gradients(losses, parameters, 0)
        reached = [p for p, gradient in zip(parameters, found, strict=True) if gradient is not None]
        if any(compat.has_gradient_hooks(p) for p in reached):
            return None  # something waits for gradients to arrive: an optimizer in backward
        if _are_finite(found):
            return found
        least = _fewest_halvings(losses, parameters, self._most_halvings(owner))
        if least is None:
            return None
        found = _gradients(losses, parameters, least)
        with torch.no_grad():
            found = [g * 2.0**least if g is not None else None for g in found]
        if not _are_finite(found):
            return None
        self._lower(owner, least, step)
        return found

    def updated(self, scaler: Any) -> float | None:
        """A scaler of the script's was updated: what its scale is to be now; None to leave it."""
        halvings = self._pending.pop(scaler, 0)
        return scaler.get_scale() * 2.0**-halvings if halvings else None

    def close(self) -> None:
        if len(self._steps) > 1:
            say(f"{len(self._steps)} steps in all were made again at a lower loss scale")

    def _most_halvings(self, owner: object | None) -> int:
        scale = compat.loss_scale(owner) if _can_fall(owner) else None
        return max(0, math.floor(math.log2(float(scale)))) if scale is not None and float(scale) > 0 else 0

    def _lower(self, owner: Any, halvings: int, step: int) -> None:
        if isinstance(owner, Lowerable):
            owner.lower(halvings)
        else:
            self._pending[owner] = max(halvings, self._pending.get(owner, 0))
        if not self._steps:
            scale = owner.get_scale()
            say(
                f"step {step}: gradients overflow at the loss scale {scale:g}; made again at {scale * 2.0**-halvings:g} "
                "(more of these are counted, not said)"
            )
        self._steps.add(step)


def _can_fall(owner: object | None) -> bool:
    """Whether a scale is one that can be told to: the script's own scaler, or the gained one. An engine keeps its own."""
    if isinstance(owner, Lowerable):
        return True
    return isinstance(owner, compat.GRAD_SCALER) and not isinstance(owner, compat.BorrowedScaler) and owner.is_enabled()


def _fewest_halvings(losses: Sequence[Tensor], parameters: Sequence[Tensor], most: int) -> int | None:
    """How often the scale has to be halved; None where `most` is not enough. Some log2 of it backward passes."""
    bad, good = 0, 1
    while good <= most and not _are_finite(_gradients(losses, parameters, good)):
        bad, good = good, good * 2 if good * 2 <= most or good == most else most
    if good > most:
        return None
    while good - bad > 1:
        middle = (bad + good) // 2
        bad, good = (bad, middle) if _are_finite(_gradients(losses, parameters, middle)) else (middle, good)
    return good


def _gradients(losses: Sequence[Tensor], parameters: Sequence[Tensor], halvings: int) -> Gradients:
    begin = [torch.full_like(loss, 2.0**-halvings) for loss in losses]
    found = torch.autograd.grad(losses, parameters, begin, retain_graph=True, allow_unused=True)
    return list(found)


def _are_finite(gradients: Gradients) -> bool:
    return all_finite(g for g in gradients if g is not None)
