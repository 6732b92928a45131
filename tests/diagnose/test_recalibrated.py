"""A running statistic that leaves float32's range in a pass that only collects statistics, before there is any loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Guard = Callable[..., Any]


def recalibrate() -> None:
    """The batch's own output is finite: 1 / sqrt(Inf) is 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None))
    model.train()
    with torch.no_grad():
        for k in range(3):
            x = torch.randn(8, 3)
            if k == 1:
                x[5] = 3e25
            model(x)


def test_the_bound_is_one_whose_square_fits(guard: Guard) -> None:
    run = guard(recalibrate)
    assert run.faults == 0, run.stderr
    incident = run.first
    assert (incident.cause, incident.module) == ("overflow", "1"), run.stderr
    (fix,) = [fix for fix in incident.fixes if fix.action == "clamp"]
    assert fix.verified, run.stderr
    assert "max=1e+25" not in fix.how
