"""Are the gradients finite? asked before an optimizer uses them, where no scaler has asked already."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ampguard import compat
from ampguard.numerics import is_finite

SMALL = 1 << 14
"""Elements up to which gradients are looked at together: one operator for many, at the price of a copy."""


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients that an optimizer is about to use."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether all gradients that lie on the CPU are finite; to look at others would mean to wait for the device."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        if type(gradient) is not Tensor or not gradient.is_cpu:
            continue  # a fake one, one that is spread over ranks
        if gradient.layout != torch.strided:
            gradient = compat.stored_values(gradient)
        if gradient.numel() <= SMALL:
            small.setdefault(gradient.dtype, []).append(gradient)
        elif not is_finite(gradient):
            return False
    return all(is_finite(compat.flattened(together)) for together in small.values())
