"""Clipping as timm names it: by the global norm, by value, or adaptively for each unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MODES = ("norm", "value", "agc")

SMALLEST_WEIGHT_NORM = 1e-3
SMALLEST_GRADIENT_NORM = 1e-6
"""The two epsilons of adaptive clipping, as in the paper's code and in timm."""


def clip_(parameters: Sequence[Tensor], limit: float, mode: str) -> None:
    """Clip the `.grad` of the parameters in place; they must be unscaled."""
    if mode == "norm":
        torch.nn.utils.clip_grad_norm_(parameters, limit)
    elif mode == "value":
        torch.nn.utils.clip_grad_value_(parameters, limit)
    else:
        for p in parameters:
            if p.grad is not None:
                _clip_adaptively_(p, limit)


@torch.no_grad()
def _clip_adaptively_(parameter: Tensor, factor: float) -> None:
    """No unit's gradient longer than `factor` times its weights.

    A unit is what belongs to one output: a row of a matrix, a filter; a vector is one unit. Adaptive gradient clipping
    of Brock et al., High-Performance Large-Scale Image Recognition Without Normalization, 2021 (arXiv:2102.06171).
    """
    grad = parameter.grad
    assert grad is not None
    largest = _unit_norm(parameter).clamp(min=SMALLEST_WEIGHT_NORM) * factor
    norm = _unit_norm(grad)
    clipped = grad * (largest / norm.clamp(min=SMALLEST_GRADIENT_NORM))
    grad.copy_(torch.where(norm < largest, grad, clipped))


def _unit_norm(tensor: Tensor) -> Tensor:
    dims = tuple(range(1, tensor.dim())) or None
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=tensor.dim() > 1)
    return norm
