"""Gradients of a loss that was not scaled, added by the script to those of one that was.

`torch.autograd.grad(penalty, parameters)` gives true gradients; added to a `.grad` that carries the loss scale they are
divided with it. In iterations that are looked at closely, a few small gradients are copied where such a call has been
made, and compared when the scaler comes to divide them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.gradients import SMALL, OptimizerWatch
from ampguard.capture.record import Line

MOST = 3
"""Parameters that are copied."""

LIKE = 0.05
"""How far what was added may be from a multiple of the gradient: adding it to a much larger one has rounded it."""

FAR = 64.0
"""What was added must be this many times smaller than a scaled gradient of its loss would be."""


@dataclass(slots=True)
class _Taken:
    """A true gradient of a parameter, and what the parameter held when it was taken."""

    parameter: Tensor
    held: Tensor
    gradient: Tensor
    where: Line | None

    def added(self) -> float | None:
        """How many times the gradient was added since; None where something else was done. Waits for the device."""
        now = self.parameter.grad
        if now is None or now.shape != self.held.shape:
            return None
        with torch.no_grad(), compat.unseen():
            change = (now.detach().double() - self.held.double()).flatten()
            g = self.gradient.double().flatten()
            square = float(g @ g)
            if not square or not bool(change.isfinite().all()):
                return None
            times = float(change @ g) / square
            return times if times and float((change - times * g).norm()) <= LIKE * abs(times) * square**0.5 else None


class AddedGradients:
    """What `torch.autograd.grad` gave of losses that were not scaled, until the next update."""

    def __init__(self) -> None:
        self._taken: list[_Taken] = []

    def taken(self, inputs: Any, results: Any, where: Line | None) -> None:
        """`results` are the gradients of a loss without a scale with respect to `inputs`."""
        pairs = [(p, g) for p, g in zip(inputs, results, strict=False) if _is_small(p) and isinstance(g, Tensor)]
        with torch.no_grad(), compat.unseen():
            for p, g in sorted(pairs, key=lambda pair: int(pair[0].numel()))[-MOST:]:
                self._taken.append(_Taken(p, p.grad.detach().clone(), g.detach().clone(), where))

    def to(self, watch: OptimizerWatch, scale: float) -> tuple[float, Line | None] | None:
        """How often such a gradient was added to those of `watch`, which carry `scale`, and where it was taken."""
        if not self._taken:
            return None
        held = {id(p) for p in watch.parameters()}
        for taken in self._taken:
            times = taken.added() if id(taken.parameter) in held else None
            if times is not None and abs(times) * FAR < scale:
                return times, taken.where
        return None

    def forget(self) -> None:
        """An iteration is over."""
        self._taken.clear()


def wants(inputs: Any) -> bool:
    """Whether any of `inputs` is a parameter that holds a gradient already."""
    return isinstance(inputs, Iterable) and any(_is_small(p) for p in inputs)


def _is_small(p: Any) -> bool:
    return (
        isinstance(p, Tensor)
        and p.is_leaf
        and p.grad is not None
        and type(p.grad) is Tensor
        and not p.grad.is_sparse
        and p.numel() <= SMALL
    )
