"""An optimizer of the script's own whose learning rate is a tensor: one for each of several models in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Stacked(torch.optim.Optimizer):
    """Gradient descent; the first dimension of each parameter is that of the models."""

    def __init__(self, parameters: Iterable[Tensor], lr: Tensor) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"].view(-1, *[1] * (parameter.dim() - 1)) * parameter.grad


def train(rates: list[float], steps: int = 40) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 8, 8) / 3)
    optimizer = Stacked([weight], torch.tensor(rates))
    for _ in range(steps):
        x = torch.randn(3, 16, 8)
        loss = ((x @ weight).tanh() @ weight - 1).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_rate_for_each_model_is_a_rate(guard: Guard, capsys: pytest.CaptureFixture[str]) -> None:
    assert guard(lambda: train([1e-4, 3e-4, 1e-3])).report.incidents == ()
    assert "fault of its own" not in capsys.readouterr().err


def test_their_largest_is_the_one_that_is_lowered(guard: Guard) -> None:
    watched = guard(lambda: train([1e-4, 3e-4, 3.0], steps=60))
    assert watched.first.cause == "divergence"
    assert watched.first.fixes[0].action == "lower-learning-rate"
    assert "it is 3)" in watched.first.fixes[0].how
