"""Steps that a scaler skips at a scale of 1 or less are not the scale's doing, however many it has skipped on its way there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Guard = Callable[..., Any]


def train(size: float) -> float:
    """The inputs become large; the weights hardly change, as most steps are skipped."""
    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(net.parameters())
    scaler = torch.amp.GradScaler("cpu")
    for step in range(40):
        x = torch.randn(32, 8) * size ** min(step // 5, 3)
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(x)
        optimizer.zero_grad()
        scaler.scale(out.float().pow(2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


def test_gradients_beyond_float16_are_told(guard: Guard) -> None:
    run = guard(lambda: train(4.0))
    assert run.faults == 0, run.stderr
    assert run.result < 1.0
    assert {i.cause: i.severity for i in run.report.incidents} == {
        "loss-scale-overflow": "info",
        "gradient-overflow": "error",
    }


def test_a_scale_that_settles_above_is_no_failure(guard: Guard) -> None:
    run = guard(lambda: train(2.0))
    assert (run.faults, {i.severity for i in run.report.incidents}) == (0, {"info"})
    assert run.result >= 1.0
