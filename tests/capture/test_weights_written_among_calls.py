"""Weights that are written between two passes of one iteration, where glue is kept call by call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from watching import Watched, seed_everything

from ampguard.capture.glue import schedule

STEPS = 6


def ascend_and_descend() -> None:
    """Sharpness-aware minimisation, the size of the ascent smoothed outside `no_grad`."""
    seed_everything()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(STEPS):
        x = torch.randn(12, 6)
        model(x).square().mean().backward()
        size = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        steps = [0.05 * p.grad / (size + 1e-8) for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for parameter, step in zip(model.parameters(), steps, strict=True):
                parameter.add_(step)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter, step in zip(model.parameters(), steps, strict=True):
                parameter.sub_(step)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("is_short", [True, False])
def test_the_guard_stays_on(is_short: bool, guard: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "LONG_STEP", 60.0 if is_short else 0.0)
    run = guard(ascend_and_descend)
    assert run.faults == 0, run.stderr
    assert run.report.steps == STEPS
