"""Gradients that clipping by their norm has made zero: each of them is finite, and their norm is not.

`clip_grad_norm_` multiplies by limit / norm, which is 0 then. A script that asks for the norm and skips the step has lost
nothing; where the optimizer steps all the same, it learns nothing, and nobody says so. Without a limit (`inf`, to ask for
the norm only) the factor is Inf / Inf, and the gradients become NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ampguard.capture.record import Line
from ampguard.compat import storage_key
from ampguard.numerics import all_finite_on_cpu


@dataclass(frozen=True, slots=True)
class CutToZero:
    """What is known of them. `dtype` is that of their norm, `norms` what it is in float32 and in float64."""

    gradients: frozenset[int]
    """By the identity of their memory."""
    dtype: torch.dtype
    norms: tuple[float, float]
    largest: float
    limit: float
    line: Line | None

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are what an optimizer holds that was given these parameters."""
        return any(p.grad is not None and storage_key(p.grad) in self.gradients for p in parameters)


def about_to_be_cut(
    gradients: Sequence[Tensor],
    dtype: torch.dtype,
    limit: float,
    order: float,
    line: Line | None,
    last: CutToZero | None = None,
) -> CutToZero | None:
    """Asked where their norm, in this precision, was found infinite, and before they are multiplied. None where one of
    them is infinite itself.

    `last`: what was found before; at the same line the numbers of that are enough.
    """
    if not all(g.is_cpu and g.layout is torch.strided for g in gradients) or not all_finite_on_cpu(gradients):
        return None
    keys = frozenset(map(storage_key, gradients))
    if last is not None and (last.line, last.dtype, last.limit) == (line, dtype, limit):
        return replace(last, gradients=keys)
    with torch.no_grad():
        in_float32, exact = (_norm(gradients, order, single) for single in (torch.float32, torch.float64))
        largest = max(float(g.abs().max()) for g in gradients if g.numel())
    return CutToZero(keys, dtype, (in_float32, exact), largest, limit, line)


def _norm(gradients: Sequence[Tensor], order: float, dtype: torch.dtype) -> float:
    """One tensor at a time is widened (or narrowed) to `dtype`."""
    each = [torch.linalg.vector_norm((g.abs() if g.is_complex() else g).to(dtype), order) for g in gradients]
    return float(torch.linalg.vector_norm(torch.stack(each), order))
