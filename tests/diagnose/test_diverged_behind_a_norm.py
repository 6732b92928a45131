"""Weights that grow until they overflow behind a normalisation: the loss says nothing of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, seed_everything

Guard = Callable[..., Watched]


class Decayed(torch.optim.Optimizer):
    """SGD with a decoupled weight decay of either sign."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model.parameters(), {"lr": 1e-2, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["decay"]).sub_(group["lr"] * p.grad)


def train(decay: float, by_hand: int | None = None) -> Callable[[], None]:
    def body() -> None:
        seed_everything()
        model = nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12, affine=False))
        optimizer = Decayed(model, decay)
        for step in range(160):
            x = torch.randn(16, 6)
            if step == by_hand:
                with torch.no_grad():
                    model[0].weight.mul_(1e25)
            loss = F.mse_loss(model(x), x.repeat(1, 2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return body


def test_decay_of_the_wrong_sign(guard: Guard) -> None:
    run = guard(train(-0.5))
    assert run.faults == 0, run.stderr
    assert run.causes == ["divergence"]
    assert run.first.evidence["weights_grew_by"] > 1e15
    assert run.first.evidence["began_at_step"] < 10
    assert run.first.evidence["last_finite_loss"] < 10


@pytest.mark.parametrize("decay", [0.5, 1e-3])
def test_decay_of_the_right_sign(decay: float, guard: Guard) -> None:
    assert guard(train(decay)).causes == []


def test_weights_that_somebody_makes_large(guard: Guard) -> None:
    assert guard(train(1e-3, by_hand=80)).causes == ["overflow"]
