"""Gradients that a script averages over models by hand, divides by the scale while it is at it, and lets the scaler divide."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]
SCALE = 1024.0


def replicas(divides: bool, first: int) -> Callable[[], list[float]]:
    def body() -> list[float]:
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
        models = [base, copy.deepcopy(base)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        seen = []
        for step in range(24):
            for model, optimizer in zip(models, optimizers, strict=True):
                x = torch.randn(16, 6)
                with torch.autocast("cpu", dtype=torch.float16):
                    out = model(x)
                optimizer.zero_grad()
                scaler.scale((out.float() - x[:, :1]).square().mean()).backward()
            scale = scaler.get_scale()
            for group in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.grad for p in group if p.grad is not None]).mean(0)
                mean /= scale if divides and step >= first else 1.0
                for p in group:
                    assert p.grad is not None
                    p.grad.copy_(mean)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            seen.append(scale)
        return seen

    return body


@pytest.mark.parametrize("first", [0, 11])
def test_divided_beside_the_mean(first: int, guard: Guard) -> None:
    run = guard(replicas(True, first))
    assert run.faults == 0, run.stderr
    assert run.first.cause == "double-unscale"
    assert run.first.evidence["factor"] == 1.0 / SCALE
    assert first <= run.first.step <= first + 5  # (such a loop is looked at closely now and then)


def test_mean_alone(guard: Guard) -> None:
    run = guard(replicas(False, 0))
    assert (run.faults, run.causes) == (0, [])
