"""Clipping by a limit that is computed of norms: of scaled gradients it lets everything pass (AutoClip before `unscale_`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, seed_everything

Guard = Callable[..., Watched]
Norm = Callable[[list[Tensor]], float]


def by_hand(parameters: list[Tensor]) -> float:
    return sum(p.grad.norm(2).item() ** 2 for p in parameters if p.grad is not None) ** 0.5


def by_clipping(parameters: list[Tensor]) -> float:
    return nn.utils.clip_grad_norm_(parameters, float("inf")).item()


def by_torch(parameters: list[Tensor]) -> float:
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()


def train(norm: Norm, measures_scaled: bool, clips_by: Callable[[list[float]], float], lr: float, steps: int) -> None:
    """A regression."""
    seed_everything()
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    parameters: list[Tensor] = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    seen: list[float] = []
    for _ in range(steps):
        x = torch.randn(32, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = (out.float().squeeze(1) - x.sum(1)).pow(2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if measures_scaled:
            seen.append(norm(parameters))
        scaler.unscale_(optimizer)
        if not measures_scaled:
            seen.append(norm(parameters))
        nn.utils.clip_grad_norm_(parameters, clips_by([s for s in seen if s < float("inf")]))
        scaler.step(optimizer)
        scaler.update()


def lowest(norms: list[float]) -> float:
    return 0.77 * min(norms, default=1.0)


@pytest.mark.parametrize("norm", [by_hand, by_clipping, by_torch])
def test_the_limit_is_told(norm: Norm, guard: Guard) -> None:
    incident = guard(lambda: train(norm, True, lowest, lr=1e-6, steps=8)).first
    assert (incident.cause, incident.severity, incident.step) == ("clip-before-unscale", "error", 0)
    assert incident.evidence["limit"] == pytest.approx(incident.evidence["norm"] * 256 * 0.77, rel=0.01)
    assert "nothing is ever clipped" in incident.explanation
    assert incident.location is not None
    assert "norm" in incident.location.code


def test_what_follows_is_a_part_of_it(guard: Guard) -> None:
    run = guard(lambda: train(by_hand, True, lowest, lr=0.2, steps=60))
    assert [i.cause for i in run.report.incidents if i.severity == "error"] == ["clip-before-unscale"]
    assert "Failures that follow from it" in run.first.explanation


@pytest.mark.parametrize("norm", [by_hand, by_clipping])
def test_limits_of_true_norms(norm: Norm, guard: Guard) -> None:
    run = guard(lambda: train(norm, False, lowest, lr=1e-6, steps=8))
    assert [i.cause for i in run.report.incidents if i.severity != "info"] == []


@pytest.mark.parametrize("limit", [1.0, 1.2345])
def test_norms_that_are_only_logged(limit: float, guard: Guard) -> None:
    incident = guard(lambda: train(by_hand, True, lambda norms: limit, lr=1e-6, steps=8)).first
    assert (incident.cause, incident.severity) == ("clip-before-unscale", "warning")
    assert "limit" not in incident.evidence
