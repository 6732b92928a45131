"""O3: everything in float16, the update too. The fastest mode, and the one that loses most."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ampguard.engine.precision.base import Precision
from ampguard.engine.precision.weights import LowWeights

EPS = 1e-4
"""Above float16's smallest normal number (6.1e-5): an eps of 1e-8 is 0 in float16, and 0 / (0 + eps) is NaN."""


class O3(Precision):
    """float16 weights, updated in float16; the loss scale keeps the backward pass above zero."""

    name = "O3"
    weights_dtype = torch.float16
    scales_loss = True
    takes_closures = False

    def convert(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], in_fp32: Sequence[nn.Module]
    ) -> None:
        self.low_weights = LowWeights(models, self.weights_dtype, in_fp32)
        for number, optimizer in enumerate(optimizers):
            for before, after in raise_eps(optimizer):
                self.notes.append(
                    f"eps of optimizer {number} raised from {before:g}, {too_small(before)}, to {after:g}"
                )
            lower_state(optimizer)


@torch.no_grad()
def lower_state(optimizer: Optimizer) -> None:
    """What earlier steps have left for the weights (moments) gets their type, as if it had begun with them."""
    for weight, state in optimizer.state.items():
        for key, value in state.items():
            if (
                isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and value.shape == weight.shape
                and value.dim()
            ):
                state[key] = value.to(weight.dtype)


def too_small(eps: float) -> str:
    """What such an eps is in float16, in words."""
    return "which is 0 in float16" if float(torch.tensor(eps).half()) == 0 else "which float16 cannot hold exactly"


def raise_eps(optimizer: Optimizer) -> list[tuple[float, float]]:
    """Raise each eps that vanishes in float16. Returns (before, after) of those that were changed."""
    changed = []
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if isinstance(eps, float) and eps < torch.finfo(torch.float16).smallest_normal:
            group["eps"] = EPS
            changed.append((eps, EPS))
    return changed
