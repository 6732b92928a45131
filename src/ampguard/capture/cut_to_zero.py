"""Gradients that clipping by their norm has made zero: each of them is finite, and their norm is not.

`clip_grad_norm_` multiplies by limit / norm, which is 0 then. A script that asks for the norm and skips the step has lost
nothing; where the optimizer steps all the same, it learns nothing, and nobody says so. Without a limit (`inf`, to ask for
the norm only) the factor is Inf / Inf, and the gradients become NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    order: float
    line: Line | None

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are what an optimizer holds that was given these parameters."""
        return any(p.grad is not None and storage_key(p.grad) in self.gradients for p in parameters)


def about_to_be_cut(
    gradients: Sequence[Tensor], dtype: torch.dtype, limit: float, order: float, line: Line | None
) -> CutToZero | None:
    """Asked where their norm, in this precision, was found infinite, and before they are multiplied. None where one of
    them is infinite itself."""
    dense = [g.detach() for g in gradients]
    if not all_finite_on_cpu(dense):
        return None
    each = [torch.linalg.vector_norm(g, order, dtype=torch.float64) for g in dense]
    largest = max(float(torch.linalg.vector_norm(g, float("inf"))) for g in dense)
    exact = torch.linalg.vector_norm(torch.stack(each), order)
    singles = [torch.linalg.vector_norm(g, order, dtype=torch.float32) for g in dense]
    single = torch.linalg.vector_norm(torch.stack(singles), order)
    keys = frozenset(map(storage_key, dense))
    return CutToZero(keys, dtype, (float(single), float(exact)), largest, limit, order, line)
