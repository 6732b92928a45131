"""Gradients that a script divides by a loss scale which it has read once, before the scale changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]
GROWS_AFTER = 12


def trained(reads_anew: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0)
    factor = 1.0 / scaler.get_scale()
    for it in range(20):
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.randn(8, 6))
        optimizer.zero_grad()
        scaler.scale(out.float().square().mean()).backward()
        if reads_anew:
            factor = 1.0 / scaler.get_scale()
        for p in model.parameters():
            p.grad.mul_(factor)
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        if it == GROWS_AFTER:
            scaler.update(512.0)


def test_the_scale_has_grown_since(guard: Guard) -> None:
    run = guard(lambda: trained(False))
    assert (run.faults, run.causes) == (0, ["bypassed-scaler"]), run.stderr
    assert (run.first.step, run.first.evidence["factor"]) == (GROWS_AFTER + 1, 2.0)
    assert run.first.location.code == "optimizer.step()"
    assert "divided by 256, the loss scale of an earlier iteration" in run.first.explanation


def test_the_scale_is_read_anew(guard: Guard) -> None:
    run = guard(lambda: trained(True))
    assert (run.faults, run.causes) == (0, []), run.stderr


@pytest.mark.parametrize("scale", [64.0, 1024.0])
def test_a_division_by_something_else(scale: float, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
        for _ in range(14):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(8, 6))
            scaler.scale(out.float().square().mean()).backward()
            scaler.unscale_(optimizer)
            for p in model.parameters():
                p.grad.div_(8.0)
            scaler.step(optimizer)
            scaler.update()

    run = guard(body)
    assert (run.faults, run.causes) == (0, []), run.stderr
