"""Fixes are told in the order of how little they change, and none is verified after which training cannot go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


def test_a_fix_that_makes_another_loss_comes_last_and_says_so(guard: Guard) -> None:
    """The determinant is 1e-40: its logarithm is ordinary, its reciprocal leaves float32, and 1e-6 is no small addition."""

    def body() -> None:
        model = nn.Linear(10, 10, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        with torch.no_grad():
            model.weight.copy_(torch.eye(10) * 1e-4)
        loss = torch.log(torch.det(model(torch.eye(10))))
        loss.backward()
        optimizer.step()

    first = guard(body).first
    assert first.cause == "gradient-overflow"
    verified = [fix for fix in first.fixes if fix.verified]
    assert verified[0].action == "stable-form"
    assert "no longer" not in verified[0].outcome
    others = [fix for fix in verified if "1e-6" in fix.how]
    assert others
    assert all("no longer" in fix.outcome for fix in others)


class Diverged(nn.Module):
    """Steps of a differential equation whose solution explodes as soon as its rate is large."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.rate.weight, 0.5)

    def forward(self, y: Tensor) -> Tensor:
        for _ in range(4):
            y = self.rate(y**3)
        return y


def test_a_loss_far_from_all_before_it_is_said_to_be_so(guard: Guard) -> None:
    def body() -> None:
        model = Diverged()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(5):
            if step == 4:
                nn.init.constant_(model.rate.weight, 1e3)
            loss = model(torch.ones(2, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step) == ("overflow", 4)
    assert all("far from the" in fix.outcome for fix in first.fixes if fix.verified)
    assert any(fix.action == "clip-gradients" and "learning rate" in fix.how for fix in first.fixes)


class Actor(nn.Module):
    """A squashed Gaussian policy: the log-probability takes logarithms too."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(2, 1)

    def forward(self, state: Tensor) -> Tensor:
        dist = torch.distributions.Normal(self.mean(state), 0.1)
        u = dist.rsample()
        a = torch.tanh(u)
        logp = dist.log_prob(u) - torch.log(1 - a**2)
        return logp.mean()


def test_a_logarithm_beside_a_log_probability_is_changed_in_the_code(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        Actor()(torch.full((4, 2), 100.0)).backward()

    fix = guard(body).first.fixes[0]
    assert fix.verified
    assert fix.how == "logp = dist.log_prob(u) - torch.log((1 - a**2).clamp(min=1e-6))"


def test_the_operand_of_any_singular_function_is_moved_in_the_code(guard: Guard) -> None:
    def body() -> None:
        model = nn.Linear(2, 1)
        nn.init.zeros_(model.weight)
        nn.init.ones_(model.bias)
        distance = torch.acosh(model(torch.ones(3, 2)))
        distance.mean().backward()

    first = guard(body).first
    assert first.cause == "singular-gradient"
    assert first.fixes[0].verified
    assert first.fixes[0].how == "distance = torch.acosh(model(torch.ones(3, 2)) + 1e-6)"
