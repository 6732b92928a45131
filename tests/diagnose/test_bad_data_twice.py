"""Bad data of two batches, which become NaN in different layers: told once, and counted."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from watching import Watched, seed_everything


def test_bad_batches_that_fail_in_different_operators_are_one_incident(guard: Callable[..., Watched]) -> None:
    """One infinity stays one behind a layer of positive weights, and is NaN in the normalisation; two give Inf - Inf."""
    seed_everything()
    net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with torch.no_grad():
        net[0].weight.abs_()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    data = torch.randn(9, 8, 3)
    data[3, 5, 0] = math.inf
    data[6, 5, :2] = torch.tensor([math.inf, -math.inf])

    def body() -> None:
        for x in data:
            loss = net(x).square().mean()
            if not loss.isfinite():
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert [(i.cause, i.step, i.occurrences) for i in run.report.incidents] == [("nonfinite-input", 3, 2)]
    assert not run.faults
