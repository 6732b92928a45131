"""The step at which small gradients or small updates began to be lost, though it is proved later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


def train_in_half(weights: list[float]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(64, 64)
    for weight in weights:
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(x)
        loss = (out - 1).pow(2).mean() * weight
        opt.zero_grad()
        loss.backward()
        opt.step()


@pytest.mark.parametrize("weight", [2e-5, 1e-9])
def test_gradients_lost_since_the_first_step(weight: float, guard: Guard) -> None:
    (incident,) = guard(lambda: train_in_half([weight] * 6)).report.incidents
    assert (incident.cause, incident.step) == ("gradient-underflow", 0)
    proved = incident.evidence["replayed_step"]
    assert proved >= 1
    assert f"in step {proved}" in incident.explanation
    assert "since step 0" in incident.explanation


def test_gradients_lost_since_a_later_step(guard: Guard) -> None:
    (incident,) = guard(lambda: train_in_half([1.0] * 6 + [2e-5] * 12)).report.incidents
    assert incident.cause == "gradient-underflow"
    assert incident.step >= 6


def train_on(dtype: torch.dtype, rate: float, again: int = 1) -> None:
    """Two stages; the second one's model and optimizer are gone when the run ends."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    x, y = torch.randn(32, 16), torch.randint(4, (32,))
    stages = [(torch.float32, 1e-2, 40), *[(dtype, rate, 40)] * again]
    for precision, lr, steps in stages:
        net = net.to(precision)
        opt = torch.optim.AdamW(net.parameters(), lr=lr)
        for _ in range(steps):
            opt.zero_grad()
            nn.functional.cross_entropy(net(x.to(precision)).float(), y).backward()
            opt.step()


def test_updates_lost_in_a_second_stage(guard: Guard) -> None:
    run = guard(lambda: train_on(torch.bfloat16, 1e-6))
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step) == ("lost-update", 40)
    assert incident.evidence["noticed_at_step"] <= 64


@pytest.mark.parametrize(("dtype", "rate"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-6)])
def test_second_stages_that_learn(dtype: torch.dtype, rate: float, guard: Guard) -> None:
    assert guard(lambda: train_on(dtype, rate, again=2)).report.incidents == ()
