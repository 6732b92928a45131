"""float32 master copies of low-precision weights: the optimizer updates these, the model gets them rounded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Masters:
    """Made before the weights are cast, so that they hold what was rounded off.

    Gradients go to the master as they arrive, in float32, and are not kept in the low precision: `zero_grad` of the
    optimizer clears all there is.
    """

    def __init__(self, optimizers: Sequence[Optimizer], to_cast: set[int]) -> None:
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
            weight.register_post_accumulate_grad_hook(_MoveTo(master))
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

    def state(self) -> list[Tensor]:
        """All masters, in the order of the optimizers and their parameters."""
        return [master.detach() for pairs in self._pairs.values() for _, master in pairs]

    @torch.no_grad()
    def load(self, saved: Sequence[Tensor]) -> None:
        for master, value in zip(self.state(), saved, strict=True):
            master.copy_(value)


class _MoveTo:
    """A hook of a low-precision weight: its gradient is added to the master's."""

    def __init__(self, master: Tensor) -> None:
        self._master = master

    def __call__(self, weight: Tensor) -> None:
        grad, weight.grad = weight.grad, None
        if grad is None:
            return
        with torch.no_grad():
            grad = grad.float()
            self._master.grad = grad if self._master.grad is None else self._master.grad.add_(grad)
