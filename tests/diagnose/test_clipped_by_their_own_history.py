"""Limits that a script makes of the norms it has seen: those of scaled gradients carry the scale as the norms do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
Limit = Callable[[list[float], float], float]


def trained(limit: Limit) -> Callable[[], None]:
    """`limit` gets the norms of all iterations so far, and how much of the training is left."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=4096.0)
        norms: list[float] = []
        for it in range(24):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(64, 6))
            scaler.scale(out.float().sub(1).square().mean()).backward()
            grads: list[Tensor] = [p.grad for p in model.parameters() if p.grad is not None]
            norms.append(sum(g.norm().item() ** 2 for g in grads) ** 0.5)
            nn.utils.clip_grad_norm_(model.parameters(), limit(norms, 1 - it / 24))
            scaler.step(opt)
            scaler.update()

    return body


def lowest_tenth(norms: list[float], left: float) -> float:
    return sorted(norms)[len(norms) // 10]


def running_mean(norms: list[float], left: float) -> float:
    return 1.5 * sum(norms[-8:]) / len(norms[-8:])


@pytest.mark.parametrize("limit", [lowest_tenth, running_mean])
def test_no_clip_is_told(limit: Limit, guard: Guard) -> None:
    incidents = guard(trained(limit)).report.incidents
    assert all(incident.severity != "error" for incident in incidents)


def test_a_limit_that_is_lowered_step_by_step(guard: Guard) -> None:
    """It is computed, and has nothing to do with the norms."""
    incidents = guard(trained(lambda norms, left: 0.317 * left**0.5 + 0.01)).report.incidents
    assert ("clip-before-unscale", "error") in [(incident.cause, incident.severity) for incident in incidents]
