"""float32 master copies of low-precision weights: the optimizer updates these, the model gets them rounded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Masters:
    """Made before the weights are cast, so that they hold what was rounded off.

    Gradients go to the master as they arrive, in float32, and are not kept in the low precision: `zero_grad` of the
    optimizer clears all there is. Those that DistributedDataParallel averages go there once they are averaged.
    """

    def __init__(self, optimizers: Sequence[Optimizer], to_cast: set[int]) -> None:
        self.averaged_by: list[nn.parallel.DistributedDataParallel] = []
        self._of: dict[int, Tensor] = {}
        self._model: dict[int, Tensor] = {}
        self._pairs: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for optimizer in optimizers:
            pairs: list[tuple[Tensor, Tensor]] = []
            self._pairs[id(optimizer)] = pairs
            for group in optimizer.param_groups:
                group["params"] = [
                    self._master(optimizer, p, pairs) if id(p) in to_cast else p for p in group["params"]
                ]

    def _master(self, optimizer: Optimizer, weight: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        master = nn.Parameter(weight.detach().clone().float(), requires_grad=weight.requires_grad)
        if weight in optimizer.state:
            optimizer.state[master] = optimizer.state.pop(weight)
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(_MoveTo(master, self))
        self._of[id(weight)] = master
        self._model[id(master)] = weight
        pairs.append((weight, master))
        return master

    def of(self, weight: Tensor) -> Tensor | None:
        """The master of a model's weight."""
        return self._of.get(id(weight))

    def model_weight(self, master: Tensor) -> Tensor:
        """The model's weight of a master; the tensor itself where it is none."""
        return self._model.get(id(master), master)

    @torch.no_grad()
    def copy_to_model(self, optimizer: Optimizer | None = None) -> None:
        """Round the masters (of one optimizer, or all) into the model."""
        chosen = self._pairs.values() if optimizer is None else [self._pairs[id(optimizer)]]
        for pairs in chosen:
            for weight, master in pairs:
                weight.copy_(master)

    def take_averaged(self) -> None:
        """A backward pass has ended: gradients that are averaged now go to their masters."""
        if self.averaged_by and all(ddp.require_backward_grad_sync for ddp in self.averaged_by):
            for pairs in self._pairs.values():
                for weight, master in pairs:
                    move_gradient(weight, master)

    def forget_unaveraged(self, optimizer: Optimizer) -> None:
        """Gradients from inside `no_sync()`, which wait in the low precision."""
        for weight, _ in self._pairs[id(optimizer)] if self.averaged_by else ():
            weight.grad = None

    def state(self) -> list[Tensor]:
        """All masters, in the order of the optimizers and their parameters."""
        return [master.detach() for pairs in self._pairs.values() for _, master in pairs]

    @torch.no_grad()
    def load(self, saved: Sequence[Tensor]) -> None:
        for master, value in zip(self.state(), saved, strict=True):
            master.copy_(value)


class _MoveTo:
    """A hook of a low-precision weight: its gradient is added to the master's."""

    def __init__(self, master: Tensor, masters: Masters) -> None:
        self._master = master
        self._masters = masters

    def __call__(self, weight: Tensor) -> None:
        if not self._masters.averaged_by:
            move_gradient(weight, self._master)


def move_gradient(weight: Tensor, master: Tensor) -> None:
    """Add a weight's gradient to its master's, in float32."""
    grad, weight.grad = weight.grad, None
    if grad is None:
        return
    with torch.no_grad():
        grad = grad.float()
        master.grad = grad if master.grad is None else master.grad.add_(grad)
