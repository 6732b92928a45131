"""A learning rate that is warmed up without an end: the run breaks where the rate is too high, and not at its start."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from watching import Watched, seed_everything

Guard = Callable[..., Watched]


def endless(by_momentum: float) -> Callable[[], None]:
    def body() -> None:
        seed_everything()
        net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=by_momentum)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 20)
        weights = torch.randn(20, 1)
        for _ in range(300):
            x = torch.randn(64, 20)
            loss = (net(x) - x @ weights).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if not torch.isfinite(loss):
                return

    return body


def test_the_rate_that_was_borne_is_named(guard: Guard) -> None:
    run = guard(endless(0.9))
    assert run.first.cause == "divergence"
    lower = next(fix for fix in run.first.fixes if fix.action == "lower-learning-rate")
    assert "still rising" in lower.how
    assert "end its warm-up at" in lower.how


def test_a_loss_that_comes_back_may_rise_a_little_first(guard: Guard) -> None:
    """The first step that was kept has left the range already; momentum carries the loss on before it falls."""
    run = guard(endless(0.9))
    lower = next(fix for fix in run.first.fixes if fix.action == "lower-learning-rate")
    assert lower.verified is True, lower.outcome


def compounding() -> None:
    """Each step raises the rate by a quarter: what it was when the loss rose is too high already."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    random_numbers = torch.Generator().manual_seed(1)
    for _ in range(90):
        x = torch.randn(32, 16, generator=random_numbers)
        loss = (net(x) - torch.sin(x.sum(1, keepdim=True))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 1.25
        if not torch.isfinite(loss):
            return


def test_lower_rates_than_that_of_the_alarm_are_tried(guard: Guard) -> None:
    run = guard(compounding)
    assert run.faults == 0
    assert run.first.cause == "divergence"
    lower = next(fix for fix in run.first.fixes if fix.action == "lower-learning-rate")
    assert lower.verified is True, lower.outcome
    assert " below 0." in lower.how
