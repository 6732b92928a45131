"""Weights that begin at zero grow many times over in health: only growth beyond proportion is divergence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, seed_everything

from ampguard.diagnose.dynamics.proportion import is_near_zero, ordinary_norm

Guard = Callable[..., Watched]
FAILS_AT = 60


class Probe(nn.Module):
    """A frozen trunk and a head of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16).requires_grad_(False)
        self.head = nn.Linear(16, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter whose second factor is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 16).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, 8) * 1e-2)
        self.b = nn.Parameter(torch.zeros(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + 4 * x @ self.a.T @ self.b.T).sum(1, keepdim=True)


class Gated(nn.Module):
    """Residual branches behind gains of zero; nothing else is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8).requires_grad_(False) for _ in range(3))
        self.gains = nn.Parameter(torch.zeros(3))
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        for branch, gain in zip(self.branches, self.gains, strict=True):
            x = x + gain * branch(x).tanh()
        return (x + self.shift).sum(1, keepdim=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=2e-2)


def train(
    model_of: type[nn.Module],
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
    size_of: Callable[[int], float] = lambda step: 1.0,
    rate_factor: float = 1.0,
    steps: int = 400,
) -> None:
    """Regression until the loss is not finite. `size_of`: by what a step's batch is multiplied."""
    seed_everything()
    model = model_of()
    optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        if step == FAILS_AT:
            optimizer.param_groups[0]["lr"] *= rate_factor
        x = torch.randn(32, 8) * size_of(step)
        loss = (model(x) - 3 * x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            return
    raise AssertionError("this loop was meant to fail")


def one_batch(step: int) -> float:
    return 1e30 if step == FAILS_AT else 1.0


def growing(step: int) -> float:
    return 40.0 ** max(0, step - FAILS_AT)


LOOPS = list(itertools.product([Probe, Adapted, Gated], [sgd, adam]))


@pytest.mark.parametrize(("model", "optimizer"), LOOPS)
def test_batch_that_overflows_zero_initialised_weights_is_an_overflow(guard: Guard, model: Any, optimizer: Any) -> None:
    run = guard(lambda: train(model, optimizer, one_batch))

    assert run.faults == 0, run.stderr
    assert (run.first.step, run.first.cause) == (FAILS_AT, "overflow"), run.first.explanation


@pytest.mark.parametrize(("model", "optimizer"), [(Probe, adam), (Adapted, adam), (Gated, adam)])
def test_data_that_grows_while_zero_initialised_weights_do_as_usual(guard: Guard, model: Any, optimizer: Any) -> None:
    run = guard(lambda: train(model, optimizer, growing))

    assert run.first.cause != "divergence", run.first.explanation


@pytest.mark.parametrize("model", [Probe, Adapted, Gated])
def test_rate_that_is_a_hundred_times_too_high_from_the_start(guard: Guard, model: Any) -> None:
    run = guard(lambda: train(model, lambda p: torch.optim.SGD(p, lr=20.0)))

    assert run.first.cause == "divergence", run.stderr


@pytest.mark.parametrize("model", [Probe, Adapted, Gated])
def test_rate_that_jumps_after_a_healthy_start(guard: Guard, model: Any) -> None:
    run = guard(lambda: train(model, sgd, rate_factor=1e5))

    assert run.first.cause == "divergence", run.stderr
    assert run.first.evidence["began_at_step"] in (FAILS_AT - 1, FAILS_AT)


def test_ordinary_size_of_weights() -> None:
    for layer in (nn.Linear(64, 128), nn.Conv2d(8, 16, 3), nn.Linear(24, 1)):
        start = float(torch.linalg.vector_norm(layer.weight.detach()))
        assert ordinary_norm([layer.weight]) == pytest.approx(start, rel=0.35)
    assert ordinary_norm([torch.zeros(4)]) == 2.0
    assert is_near_zero(1e-3, nn.Linear(64, 128).parameters())
    assert not is_near_zero(2.0, nn.Linear(64, 128).parameters())
    assert math.isclose(ordinary_norm([torch.zeros(())]), 1.0)
