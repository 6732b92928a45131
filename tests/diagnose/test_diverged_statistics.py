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
