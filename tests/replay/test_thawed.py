"""Phases of a GAN: a network that trains is frozen again before its optimizer steps, and the step is replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

Guard = Callable[..., Any]


def train(scale: float, freeze_before_step: bool, bad_step: int | None = None) -> list[nn.Module]:
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    d = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    phases = [(m.requires_grad_(False), torch.optim.Adam(m.parameters(), lr=1e-3)) for m in (g, d)]
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for step in range(8):
        for module, opt in phases:
            opt.zero_grad()
            module.requires_grad_(True)
            with torch.autocast("cpu", dtype=torch.float16):
                sign = 1.0 if module is g else -1.0
                out = d(g(torch.randn(8, 4))).float()
                loss = softplus(-sign * out).mean()
            if step == bad_step:
                loss = loss + (out * 0).square().sum().sqrt()
            scaler.scale(loss).backward()
            if freeze_before_step:
                module.requires_grad_(False)
            scaler.unscale_(opt)
            scaler.step(opt)
            module.requires_grad_(False)
        scaler.update()
    return [g, d]


@pytest.mark.parametrize("freeze_before_step", [True, False])
def test_its_gradients_are_made_again(freeze_before_step: bool, guard: Guard) -> None:
    run = guard(lambda: train(2.0**21, freeze_before_step))
    assert run.faults == 0
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity, incident.step) == ("loss-scale-overflow", "info", 0)
    assert incident.evidence["rung"] == "replay"  # not the next one that came by
    assert not any(p.requires_grad for module in run.result for p in module.parameters())


def test_a_true_failure_has_its_own_cause(guard: Guard) -> None:
    """It is the only one: nothing comes again that could be traced as it runs."""
    run = guard(lambda: train(256.0, True, bad_step=5))
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step) == ("singular-gradient", 5)
    assert incident.location is not None
    assert "square().sum().sqrt()" in incident.location.code
