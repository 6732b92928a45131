"""What one read of the gradients says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ampguard.engine.step.layout import Look


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """Every field is a 0-d float32 tensor on the gradients' device."""

    norm: Tensor | None
    """2-norm over all gradients, unscaled; Inf or NaN where a gradient is. None where it was not wanted."""
    found_inf: Tensor
    """1.0 where any gradient is Inf or NaN, else 0.0."""
    inverse_scale: Tensor
    """What the gradients are yet to be multiplied by; 1.0 without a loss scale."""
    looks: Sequence[Look] = field(default=(), repr=False, compare=False)
    """One at each group of the optimizer that steps at once; none where another call could come between."""
