"""Gradients that clipping by their norm has made zero: each of them is finite, and their norm is not.

`clip_grad_norm_` multiplies by limit / norm, which is 0 then. A script that asks for the norm and skips the step has lost
nothing; where the optimizer steps all the same, it learns nothing, and nobody says so. Without a limit (`inf`, to ask for
the norm only) the factor is Inf / Inf, and the gradients become NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from ampguard.capture.record import Line
from ampguard.compat import storage_key
from ampguard.numerics import all_finite_on_cpu


@dataclass(frozen=True, slots=True)
class CutToZero:
    """What is known of them. `dtype` is that of their norm, `norms` what it is in float32 and in float64.

    `kept`: the share of their elements that are not 0 which clipping leaves so, made again on float32 copies; 0 where their norm
    is infinite there too. `sizes`: how many elements each of them has.
    """

    gradients: frozenset[int]
    """By the identity of their memory."""
    sizes: tuple[int, ...]
    dtype: torch.dtype
    norms: tuple[float, float]
    largest: float
    kept: float
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

    `last`: what was found before; of the same kind of gradients, at the same line, the numbers of that are enough.
    """
    if not all(g.is_cpu and g.layout is torch.strided for g in gradients) or not all_finite_on_cpu(gradients):
        return None
    keys, sizes = frozenset(map(storage_key, gradients)), tuple(map(Tensor.numel, gradients))
    if last is not None and (last.line, last.dtype, last.limit, last.sizes) == (line, dtype, limit, sizes):
        return replace(last, gradients=keys)
    with torch.no_grad():
        in_float32, exact = (_norm(gradients, order, single) for single in (torch.float32, torch.float64))
        largest = max(float(g.abs().max()) for g in gradients if g.numel())
        factor = min(1.0, limit / in_float32) if isfinite(in_float32) else 0.0
        before = sum(int(g.count_nonzero()) for g in gradients)
        kept = sum(int((_in(g, torch.float32) * factor).count_nonzero()) for g in gradients) / max(before, 1)
    return CutToZero(keys, sizes, dtype, (in_float32, exact), largest, kept, limit, line)


def _in(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The sizes of the elements of a gradient, in this precision."""
    return gradient.abs().to(dtype)


def _norm(gradients: Sequence[Tensor], order: float, dtype: torch.dtype) -> float:
    """One tensor at a time is widened (or narrowed) to `dtype`."""
    each = [torch.linalg.vector_norm(_in(g, dtype), order) for g in gradients]
    return float(torch.linalg.vector_norm(torch.stack(each), order))
