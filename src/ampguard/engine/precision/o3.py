"""O3: the model and its weights in float16. Updates are computed in float32 and rounded, so small ones are lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ampguard.engine.precision.base import Precision
from ampguard.engine.precision.weights import LowWeights
from ampguard.engine.step import GradientCheck, RoundedUpdate
from ampguard.errors import ProtocolError

EPS = 1e-4
"""Above float16's smallest normal number (6.1e-5): an eps of 1e-8 is 0 in float16, and 0 / (0 + eps) is NaN."""


class O3(Precision):
    """float16 weights without float32 copies; the loss scale keeps the backward pass above zero.

    What an optimizer keeps (moments) is float32: the square of a gradient below 2e-4 is 0 in float16.
    """

    name = "O3"
    weights_dtype = torch.float16
    scales_loss = True
    takes_closures = False

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.updates_in_float32 = True
        """Not where the loop calls the optimizer's own step: that computes in the type of the weights."""
        self._updates: dict[int, RoundedUpdate] = {}
        self._raised: list[tuple[dict[str, Any], float]] = []
        """Parameter groups whose eps was raised, and what it was."""
        self._stepping_alone: list[Optimizer] = []

    def convert(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], in_fp32: Sequence[nn.Module]
    ) -> None:
        self.low_weights = LowWeights(models, self.weights_dtype, in_fp32)
        if self.updates_in_float32:
            self._updates = {id(optimizer): RoundedUpdate(optimizer, "nearest") for optimizer in optimizers}
            return
        self._stepping_alone += optimizers
        for number, optimizer in enumerate(optimizers):
            self._raised += [(group, group["eps"]) for group in optimizer.param_groups if "eps" in group]
            for before, after in raise_eps(optimizer):
                self.notes.append(
                    f"eps of optimizer {number} raised from {before:g}, {too_small(before)}, to {after:g}"
                )
            lower_state(optimizer)

    def update_in_float32(self) -> None:
        """The steps of these optimizers go through `apply` from now on, with the eps that they were given."""
        self.updates_in_float32 = True
        for group, eps in self._raised:
            if group["eps"] == EPS:
                group["eps"] = eps
        self._updates |= {id(one): RoundedUpdate(one, "nearest") for one in self._stepping_alone}
        self._raised, self._stepping_alone = [], []

    def apply_own(self, optimizer: Optimizer, check: GradientCheck, max_norm: float | None) -> bool:
        """As `apply`, with the gradients written back; False where the optimizer is none of these."""
        update = self._updates.get(id(optimizer))
        if update is not None:
            update.apply(check, max_norm, write_back=True)
        return update is not None

    def apply(self, optimizer: Optimizer, check: GradientCheck, max_norm: float | None) -> None:
        self._updates[id(optimizer)].apply(check, max_norm)

    def refuse_direct_step(self, name: str) -> None:
        if self._updates:
            raise ProtocolError(
                f"optimizer.step() of `{name}` in O3: it would compute in float16, where eps and the squares of small "
                "gradients are 0\n"
                "  do    call amp.step(optimizer) instead   (ampguard explain optimizer-underflow)",
                "optimizer-underflow",
            )


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
