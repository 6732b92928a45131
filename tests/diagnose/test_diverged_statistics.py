"""A divergence that is noticed by a running statistic, in a forward pass that has not come to a loss yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from watching import seed_everything

Guard = Callable[..., Any]


def epochs() -> None:
    seed_everything()
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8),
        nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=1e8, momentum=0.9)
    for _ in range(4):
        loss = nn.functional.cross_entropy(net(torch.randn(12, 3, 8, 8)), torch.randint(10, (12,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_untried_fixes_say_why(guard: Guard) -> None:
    run = guard(epochs)
    assert run.faults == 0, run.stderr
    assert run.first.cause == "divergence", run.stderr
    for fix in run.first.fixes:
        assert "Error:" not in str(fix.outcome), fix
        assert fix.verified is not None or "failed before it had a loss" in str(fix.outcome)


class Streaming(nn.Module):
    """Standardises by sums over all that was seen: of a channel that hardly varies rounding leaves a variance of less than 0."""

    def __init__(self) -> None:
        super().__init__()
        self.count: torch.Tensor
        self.total: torch.Tensor
        self.squares: torch.Tensor
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("squares", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += x.shape[0]
        self.total += x.detach().sum(0)
        self.squares += x.detach().square().sum(0)
        mean = self.total / self.count
        variance = self.squares / self.count - mean.square()
        return (x - mean) / (torch.sqrt(variance) + 1e-5)


def test_what_weights_of_before_fail_at_as_well_is_no_divergence(guard: Guard) -> None:
    """The variance shrinks before it is negative: the inputs grow, the loss with them, and the weights are thrown far off."""

    def body() -> None:
        seed_everything()
        model = nn.Sequential(Streaming(), nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        spread = 0.3
        for step in range(60):
            x = torch.randn(32, 4) * torch.tensor([spread, 1.0, 1.0, 1.0]) + torch.tensor([293.0, 0.0, 0.0, 0.0])
            if step >= 8:  # the channel is steady from now on, but for the rounding of its sums
                model[0].squares[0] -= 0.011 * model[0].count * min(step - 7, 8) / 8
            loss = nn.functional.huber_loss(model(x), torch.randn(32, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.first.cause == "domain-error", run.stderr
    assert "torch.sqrt(variance)" in run.first.location.code
