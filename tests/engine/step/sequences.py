"""PyTorch's sequence and ours, on copies of the same parameters and gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampguard.engine.step import LossScale, apply_update, check_gradients

SCALE = 1024.0
Kind = type[torch.optim.Optimizer]


def parameters(
    shapes: Sequence[tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def copies(of: list[nn.Parameter]) -> list[nn.Parameter]:
    return copy.deepcopy(of)


def give(to: list[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Each parameter its own copy of a gradient, as a backward pass leaves it."""
    for p, gradient in zip(to, gradients, strict=True):
        p.grad = None if gradient is None else gradient.clone()


class Theirs:
    """`unscale_`, `clip_grad_norm_`, `step`, `update` with GradScaler."""

    def __init__(self, of: list[nn.Parameter], kind: Kind, **options: Any) -> None:
        self.parameters, self.optimizer = of, kind(of, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        self.scaler.scale(torch.ones(()))

    def step(self, gradients: Sequence[Tensor | None], max_norm: float | None) -> None:
        give(self.parameters, gradients)
        self.scaler.unscale_(self.optimizer)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Ours:
    """`check_gradients`, `apply_update`, `LossScale.update`."""

    def __init__(self, of: list[nn.Parameter], kind: Kind, **options: Any) -> None:
        self.parameters, self.optimizer = of, kind(of, **options)
        self.loss_scale = LossScale(init_scale=SCALE)

    def step(self, gradients: Sequence[Tensor | None], max_norm: float | None, **more: Any) -> None:
        give(self.parameters, gradients)
        check = check_gradients(self.parameters, self.loss_scale.value)
        apply_update(self.optimizer, check, max_norm, **more)
        self.loss_scale.update([check.found_inf])


def state_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Every tensor of the optimizer's state, named by parameter and key."""
    state = optimizer.state_dict()["state"]
    return [(f"{i}.{k}", v) for i in sorted(state) for k, v in sorted(state[i].items()) if isinstance(v, Tensor)]


def assert_close(a: Tensor, b: Tensor, digits: float) -> None:
    """Within `digits` of the largest element: a sum of terms that cancel keeps no more."""
    torch.testing.assert_close(a, b, rtol=digits, atol=digits * max(1.0, a.abs().max().item()))


def assert_alike(one: Theirs | Ours, two: Theirs | Ours, digits: float = 5e-7) -> None:
    """Parameters and state agree to the last digits, and the saved states have the same keys, types and settings."""
    for a, b in zip(one.parameters, two.parameters, strict=True):
        assert_close(a.detach(), b.detach(), digits)
    mine, other = state_of(one.optimizer), state_of(two.optimizer)
    assert [name for name, _ in mine] == [name for name, _ in other]
    for (_, a), (_, b) in zip(mine, other, strict=True):
        assert_close(a, b, digits)
    assert one.optimizer.state_dict()["param_groups"] == two.optimizer.state_dict()["param_groups"]
