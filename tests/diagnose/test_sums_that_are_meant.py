"""Optimizers that compute their weights from the sum of all gradients, which they keep in `.grad`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class DualAveraging(torch.optim.Optimizer):
    """Xiao (2010): the weights are a function of the mean of all gradients so far."""

    def __init__(self, params: Any, gamma: float = 4.0, l1: float = 0.01) -> None:
        super().__init__(params, {"gamma": gamma, "l1": l1})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                mean = p.grad / self.steps
                kept = mean.sign() * (mean.abs() - group["l1"]).clamp_min(0)
                p.copy_(kept.mul_(-math.sqrt(self.steps) / group["gamma"]))


class Entropic(torch.optim.Optimizer):
    """Exponentiated gradients: softmax of the negative sum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.copy_(torch.softmax(-0.1 * p.grad.flatten(), 0).view_as(p))


class Plain(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(0.01 * p.grad)


def train(optimizer: Callable[[Any], torch.optim.Optimizer], zeros: bool) -> None:
    torch.manual_seed(0)
    net = nn.Linear(40, 3)
    if zeros:
        nn.init.zeros_(net.weight)
    opt = optimizer(net.parameters())
    for _ in range(30):
        x: Tensor = torch.randn(16, 40)
        nn.functional.mse_loss(net(x), x[:, :3]).backward()
        opt.step()


@pytest.mark.parametrize("optimizer", [DualAveraging, Entropic])
def test_weights_that_are_a_function_of_the_sum(optimizer: Any, guard: Guard) -> None:
    assert not guard(lambda: train(optimizer, zeros=True)).report.incidents


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("optimizer", [Plain, lambda p: torch.optim.SGD(p, 0.01), torch.optim.Adam])
def test_steps_along_the_sum_are_none(optimizer: Any, zeros: bool, guard: Guard) -> None:
    (incident,) = guard(lambda: train(optimizer, zeros)).report.incidents
    assert (incident.cause, incident.step) == ("missing-zero-grad", 1)


def test_weights_that_steps_have_thrown_far_off_are_none(guard: Guard) -> None:
    """The sum is multiplied in each step: the last one is nearly all that the weights are made of."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(40, 3)
        opt = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(6):
            x: Tensor = torch.randn(16, 40)
            nn.functional.l1_loss(net(x), x[:, :3]).backward()
            for p in net.parameters():
                assert p.grad is not None
                p.grad.data *= 50.0
            opt.step()

    (incident,) = guard(body).report.incidents
    assert (incident.cause, incident.step) == ("missing-zero-grad", 1)
