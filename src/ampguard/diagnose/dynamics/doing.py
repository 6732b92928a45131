"""Whose doing is it that the weights are so large: the optimizer's, or that of whoever wrote to them?

A hand that scales the weights, or loads a bad checkpoint, makes them grow as suddenly as a learning rate that is far too
high. The optimizer itself tells them apart: its state and its rates say how far one of its updates moves the weights.
"""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer

from ampguard.capture.sampling.weights import watchable
from ampguard.diagnose.dynamics.alone import update_alone
from ampguard.diagnose.dynamics.trajectory import Trajectory, is_number

ELEMENTS = 256
PARAMETERS = 64
ROOM = 10.0
"""By how much updates of before may have been larger than one that is made from what the optimizer knows now."""
ORDINARY_GRADIENT = 100.0
"""A gradient norm, where none was measured."""
LARGEST_GRADIENT = 1e18
"""Of one element: the square of it, Adam's second moment, is still a float32."""


def could_have_moved(
    optimizer: Optimizer, distance: float, updates: int, trajectory: Trajectory, rise: float = 1.0
) -> bool:
    """Whether `updates` of this optimizer's updates can have moved its weights by `distance` (a 2-norm).

    `rise`: of the loss since gradients were last measured; gradients rise with it.
    """
    reach = update_of(optimizer, largest_gradient(trajectory) * max(1.0, rise))
    return distance <= ROOM * max(1, updates) * reach


def largest_gradient(trajectory: Trajectory) -> float:
    """The largest gradient norm that was measured."""
    norms = [norm for _, norm in trajectory.recent_norms()] + [norm for _, norm in trajectory.norms.points]
    norms += [look.grad_norm for look in trajectory.looks if is_number(look.grad_norm)]
    return max(norms, default=ORDINARY_GRADIENT)


def update_of(optimizer: Optimizer, gradient: float) -> float:
    """The norm of one more update from the present state and gradients of this norm, spread evenly over all elements.

    Estimated from some elements of the largest weights. An optimizer that divides by a moment makes nearly the same update
    of any gradients; one that does not makes one in proportion, and what its momentum adds.
    """
    weights = watchable(optimizer)
    each = min(gradient / math.sqrt(max(1, sum(p.numel() for p in weights))), LARGEST_GRADIENT)
    total = 0.0
    made = 0
    for parameter in sorted(weights, key=lambda p: -p.numel())[:PARAMETERS]:
        count = min(ELEMENTS, parameter.numel())
        elements = torch.linspace(0, parameter.numel() - 1, count, device=parameter.device).long()
        update = update_alone(optimizer, parameter, elements, gradient_of=each)
        made += update is not None
        if update is not None and update.is_finite:
            moved = (update.after.double() - update.before.double()).square().sum()
            total += float(moved) * parameter.numel() / count
    return math.sqrt(total) if made and math.isfinite(total) else math.inf
