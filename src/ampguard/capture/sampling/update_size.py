"""How large an update is going to be, asked before it is made."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.sampling.copies import parameters_of
from ampguard.capture.sampling.rates import rate_of_group
from ampguard.capture.sampling.weights import norm_of
from ampguard.numerics import PLAIN


def gradient_norm(optimizer: Optimizer, by_scaler: bool) -> Tensor | None:
    """The norm of what an optimizer is about to step with, its loss scale taken out; None of sparse gradients."""
    gradients = [p.grad for p in parameters_of([optimizer]) if p.grad is not None]
    is_dense = all(g.layout == torch.strided for g in gradients)
    norm = norm_of(gradients) if is_dense else None
    scale = compat.held_scale(optimizer) if by_scaler else None
    return norm / scale if norm is not None and scale is not None else norm


def relative_size(optimizer: Optimizer, by_scaler: bool, has_new_rate: bool) -> float | None:
    """About how large an update is going to be, against the weights' norm; None where that would take waiting for a device.

    Either the optimizer multiplies its gradients by the rate (it has a momentum and no running squares: SGD), or it makes
    them about as large as 1 first (Adam and its kin): then the rate alone decides.
    """
    parameters = parameters_of([optimizer])
    if not parameters or any(type(p) not in PLAIN or p.device.type != "cpu" for p in parameters):
        return None  # (of weights that are spread over ranks a norm would have to be asked of all of them)
    rates = [rate_of_group(group) for group in optimizer.param_groups if "lr" in group]
    multiplies = all("momentum" in group and "alpha" not in group for group in optimizer.param_groups)
    if not rates or not (multiplies or has_new_rate):
        return None
    weights = norm_of(parameters)
    ones = sum(p.numel() for p in parameters)
    step = gradient_norm(optimizer, by_scaler) if multiplies else math.sqrt(ones)
    if weights is None or step is None or not float(weights):
        return None
    return max(rates) * float(step) / float(weights)
