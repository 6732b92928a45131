"""Replicas of a model, whose gradients a script averages for its optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


def rounds(clears: bool, replicas: int = 3) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    workers = [copy.deepcopy(model) for _ in range(replicas)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(12):
        for worker in workers:
            with torch.no_grad():
                for mine, shared in zip(worker.parameters(), model.parameters(), strict=True):
                    mine.copy_(shared)
            if clears:
                worker.zero_grad()
            x = torch.randn(16, 4)
            nn.functional.mse_loss(worker(x).squeeze(1), x.sum(1)).backward()
        optimizer.zero_grad()
        for p, *copies in zip(model.parameters(), *(w.parameters() for w in workers), strict=True):
            p.grad = torch.stack([c.grad for c in copies if c.grad is not None]).mean(0)
        optimizer.step()


@pytest.mark.parametrize("replicas", [1, 3])
def test_gradients_that_pile_up_are_told(guard: Guard, replicas: int) -> None:
    run = guard(lambda: rounds(clears=False, replicas=replicas))
    assert run.faults == 0, run.stderr
    (incident,) = [i for i in run.report.incidents if i.cause == "missing-zero-grad"]
    assert (incident.step, incident.severity) == (1 if replicas == 3 else 3, "error")
    assert ".backward()" in incident.location.code
    assert "zero_grad()" in incident.fixes[0].how


def test_those_that_are_cleared_are_nobodys_business(guard: Guard) -> None:
    run = guard(lambda: rounds(clears=True))
    assert run.faults == 0, run.stderr
    assert not run.report.incidents


def test_a_target_network_that_is_reached_and_never_cleared_is_no_failure(guard: Guard) -> None:
    """Its gradients are of no use to anybody."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        target = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(12):
            x = torch.randn(16, 4)
            loss = nn.functional.mse_loss(model(x), 0.9 * target(x) + x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, p in zip(target.parameters(), model.parameters(), strict=True):
                    slow.lerp_(p, 0.1)

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert "missing-zero-grad" not in run.causes
