"""Several optimizers in one iteration: a divergence is told with the losses, the rate and the name of the one that diverged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]
RATES = {"critic_opt": 1e-3, "actor_opt": 1e-3, "model_opt": 1e-3}
STEPS = 60


def train(fast: str, rate: float) -> dict[str, list[float]]:
    """Three networks with a loss each; the learning rate of one is far too high."""
    torch.manual_seed(0)
    rates = {**RATES, fast: rate}
    critic, actor, model = nn.Linear(4, 1), nn.Linear(4, 2), nn.Linear(4, 4)
    critic_opt = torch.optim.SGD(critic.parameters(), lr=rates["critic_opt"])
    actor_opt = torch.optim.SGD(actor.parameters(), lr=rates["actor_opt"])
    model_opt = torch.optim.SGD(model.parameters(), lr=rates["model_opt"])
    seen: dict[str, list[float]] = {name: [] for name in RATES}
    for _ in range(STEPS):
        x = torch.randn(16, 4)
        critic_loss = 1000.0 + (critic(x) - x.sum(1, keepdim=True)).square().mean()
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()
        actor_loss = (actor(x) - x[:, :2]).square().mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()
        model_loss = (model(x) - x).square().mean()
        model_opt.zero_grad()
        model_loss.backward()
        model_opt.step()
        losses = critic_loss, actor_loss, model_loss
        for name, loss in zip(RATES, losses, strict=True):
            seen[name].append(loss.item())
        if not all(loss.isfinite() for loss in losses):
            break
    return seen


@pytest.mark.parametrize(("fast", "rate"), [("actor_opt", 4.5), ("model_opt", 9.0)])
def test_the_one_that_diverged(fast: str, rate: float, guard: Guard) -> None:
    run = guard(lambda: train(fast, rate))
    assert run.faults == 0, run.stderr
    incident = run.first
    assert incident.cause == "divergence", run.stderr
    assert incident.evidence["optimizer"] == fast
    seen = [loss for loss in run.result[fast] if loss < float("inf")]
    assert incident.evidence["last_finite_loss"] == pytest.approx(seen[-1], rel=1e-5)
    assert incident.evidence["best_loss"] < 100.0, "the sum of all losses is above 1000 from the beginning"
    lower = next(fix for fix in incident.fixes if fix.action == "lower-learning-rate")
    assert lower.how.startswith(f"lower the learning rate of `{fast}` (it is {rate:g})")
    assert lower.verified, run.stderr
    clipping = next(fix for fix in incident.fixes if fix.action == "clip-gradients")
    assert f"for group in {fast}.param_groups" in clipping.how
