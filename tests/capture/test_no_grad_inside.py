"""A method that switches gradients off by itself is an evaluation, whatever the modes are at its call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

Guard = Callable[..., Watched]
STEPS = 6


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.net(x) - x).square().mean()


class Sampler(nn.Module):
    """Given too much noise, it takes the root of what is left of 1."""

    def __init__(self, model: Diffusion) -> None:
        super().__init__()
        self.model = model

    @torch.no_grad()
    def forward(self, x: Tensor, noise: float) -> Tensor:
        e = self.model.net(x)
        return x + torch.sqrt(1.0 - torch.full((), noise) ** 2) * e


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("keeps_output", [False, True])
def test_the_failure_of_a_sampler_is_one_of_evaluation(is_training: bool, keeps_output: bool, guard: Guard) -> None:
    def body() -> None:
        model = Diffusion()
        sampler = Sampler(model).train(is_training)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(STEPS):
            loss = model(torch.randn(8, 4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 3 == 2:
                sample = sampler(torch.randn(2, 4), 0.4 * step)
                shown = sample.std()
                if not keeps_output:
                    del sample
                shown.item()

    (incident,) = guard(body).report.incidents
    assert (incident.mode, incident.cause, incident.op) == ("eval", "domain-error", "aten.sqrt.default")
    assert incident.step == STEPS
    assert any(fix.verified for fix in incident.fixes)


def test_a_loss_that_is_only_looked_at_is_still_one_of_training(guard: Guard) -> None:
    def body() -> None:
        model = Diffusion()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(STEPS):
            loss = model(torch.randn(8, 4) * (float("inf") if step == 3 else 1.0))
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    (incident,) = guard(body).report.incidents
    assert (incident.mode, incident.step) == ("train", 3)
