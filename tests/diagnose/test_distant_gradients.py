"""Gradients that float16 lost on their way back, though few of their elements are exactly 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


def train(weight: float, scale: float | None = None) -> None:
    """Each gradient of the first layer is a sum over 512 rows."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(torch.randn(512, 64))
        loss = (out.float() - 1).pow(2).mean() * weight
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()


def test_few_zeros_and_wrong_all_the_same(guard: Guard) -> None:
    (incident,) = guard(lambda: train(1.5e-4)).report.incidents
    assert (incident.cause, incident.severity) == ("gradient-underflow", "warning")
    assert incident.evidence["flushed_share"] < 0.3
    assert incident.evidence["layers"]["0.weight"] > 0.5
    fix = incident.fixes[0]
    assert (fix.action, fix.verified) == ("raise-loss-scale", True)


@pytest.mark.parametrize(("weight", "scale"), [(1.0, None), (1.5e-4, 2.0**14)])
def test_gradients_that_float16_can_hold(weight: float, scale: float | None, guard: Guard) -> None:
    assert guard(lambda: train(weight, scale)).report.incidents == ()
