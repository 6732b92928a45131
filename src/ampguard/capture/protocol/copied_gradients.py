"""Gradients of a float16 model that a script copies into those of float32 masters: which master's are made from which?

A loop in the old way of mixed precision has the masters in its optimizer and the model in none: a backward pass reaches
no optimizer. Right after it a few small gradients of the model are copied; where the optimizer's are used, the same
numbers are looked for among those, each by itself or joined to a flat buffer, divided by something or not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.gradients import SMALL
from ampguard.capture.record import Line
from ampguard.numerics import doubles

SAME = 1e-2
OF_EACH = 3
"""Gradients of a module that are copied: the first one, with which a flat buffer begins, and some more."""
MOST = 12
COMPARED = 64
"""Pairs of a gradient and a master's that are compared."""
FEWEST = 4
"""Elements; fewer may be alike by chance."""


@dataclass(frozen=True, slots=True)
class SourceGradient:
    """A gradient as it was, and whose it is."""

    parameter: weakref.ref[Tensor]
    kept: Tensor

    @classmethod
    def of(cls, parameter: Tensor, kept: Tensor) -> SourceGradient:
        return cls(weakref.ref(parameter), kept)


@dataclass(frozen=True, slots=True)
class Copied:
    """A master whose gradient was made from a source's, by dividing that by `ratio`."""

    source: SourceGradient
    master: Tensor
    ratio: float


@dataclass(frozen=True, slots=True)
class LooseGradients:
    """Gradients of a loss that was multiplied by `scale`, which no optimizer holds."""

    scale: float
    where: Line | None
    sources: list[SourceGradient]

    @classmethod
    def of(cls, roots: Iterable[Iterable[Tensor]], scale: float, where: Line | None) -> LooseGradients | None:
        """Those of parameters in called modules; None where there are none."""
        found: dict[int, Tensor] = {}
        for parameters in roots:
            held = [p for p in parameters if p.is_leaf and type(p.grad) is Tensor and FEWEST <= p.numel() <= SMALL]
            held = held[:1] + sorted(held[1:], key=lambda p: p.numel())
            found |= {id(p): p for p in held[:OF_EACH]}
        with torch.no_grad(), compat.unseen():
            grads = [(p, p.grad) for p in islice(found.values(), MOST) if p.grad is not None and not p.grad.is_sparse]
            sources = [SourceGradient.of(p, g.detach().flatten().clone()) for p, g in grads]
        return cls(scale, where, sources) if sources else None

    def in_masters(self, masters: list[Tensor]) -> Copied | None:
        """The first gradient found among those of `masters`. Waits for the device."""
        compared = 0
        for source in self.sources:
            size = source.kept.numel()
            for master in masters:
                grad = master.grad
                if grad is None or grad.is_sparse or master is source.parameter():
                    continue
                if grad.numel() != size and (grad.dim() != 1 or grad.numel() < size):
                    continue
                compared += 1
                ratio = ratio_of(source.kept, grad)
                if ratio is not None and ratio > 0:
                    return Copied(source, master, ratio)
                if compared >= COMPARED:
                    return None
        return None


def size_of_sum(passes: list[LooseGradients], masters: Iterable[Tensor]) -> float | None:
    """The size of a gradient of `masters` over that of the largest pass's, where it is a sum of what several passes gave.

    Waits for the device.
    """
    for grad in (g for p in masters if (g := p.grad) is not None and not g.is_sparse and g.numel() <= SMALL):
        rows = [s.kept for each in passes for s in each.sources if s.kept.numel() == grad.numel()]
        if not rows or grad.numel() < 2 * len(rows):
            continue
        with torch.no_grad(), compat.unseen():
            made, now = torch.stack(rows).double(), grad.detach().double().flatten()
            norm, largest = float(now.norm()), float(made.norm(dim=1).max())
            if not bool(made.isfinite().all()) or not 0 < norm < float("inf") or not largest:
                continue
            left = float((now - made.T @ (torch.linalg.pinv(made.T) @ now)).norm())
        if left <= SAME * norm:
            return norm / largest
    return None


def ratio_of(kept: Tensor, now: Tensor | None) -> float | None:
    """What gradients were over what their first elements are now; None where that is not one number. Waits for the device.

    >>> ratio_of(torch.tensor([2.0, -4.0]), torch.tensor([[1.0, -2.0], [0.0, 7.0]]))
    2.0
    """
    if now is None or now.numel() < kept.numel():
        return None
    with torch.no_grad(), compat.unseen():
        a, b = doubles(kept), doubles(now.detach().flatten()[: kept.numel()])
        square = float(b @ b)
        if not square or not bool(a.isfinite().all()):
            return None
        ratio = float(a @ b) / square
        return ratio if float((a - ratio * b).norm()) <= SAME * float(a.norm()) else None
