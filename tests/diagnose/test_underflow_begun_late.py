"""Gradients that are flushed to zero from some step on that is no power of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ampguard.capture.sampling import weights

Guard = Callable[..., Any]


def train(late_weight: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8))
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(30):
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(torch.randn(64, 8))
        loss = (out.float() - 1).square().mean() * (1.0 if step < 19 else late_weight)
        opt.zero_grad()
        loss.backward()
        opt.step()


@pytest.mark.parametrize(("late_weight", "causes"), [(1e-6, ["gradient-underflow"]), (0.5, [])])
def test_told_when_it_begins(
    late_weight: float, causes: list[str], guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SHARE", 1.0)  # each step is looked at
    run = guard(lambda: train(late_weight))
    assert run.faults == 0, run.stderr
    assert (run.causes, [i.step for i in run.report.incidents]) == (causes, [19] * len(causes))
