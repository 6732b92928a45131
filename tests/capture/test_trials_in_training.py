"""Numbers that a step of training tries and gives up: a solver's step that was too long, a sampler's move out of the support."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Drift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, y: Tensor) -> Tensor:
        return -(y**3) + 0.1 * self.inner(y)


def solved(drift: nn.Module, y: Tensor, until: float, tried: list[float], stops: bool) -> Tensor:
    """Heun's method, whose steps are a tenth where the error is too large or no number."""
    t, h = 0.0, until
    while until - t > 1e-9:
        first = drift(y)
        second = drift(y + h * first)
        new = y + 0.5 * h * (first + second)
        with torch.no_grad():
            error = (h * (second - first)).pow(2).pow(8).sum().item()
        tried.append(error)
        if error < 1.0:
            t, y = t + h, new
        elif stops and not math.isfinite(error):
            sys.exit(1)
        else:
            h *= 0.1
    return y


def integrated(tried: list[float], stops: bool = False) -> None:
    torch.manual_seed(0)
    drift = Drift()
    optimizer = torch.optim.Adam(drift.parameters(), lr=1e-3)
    for _ in range(6):
        y = solved(drift, 2 * torch.randn(8, 2), 4.0, tried, stops)
        loss = y.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_step_of_a_solver_that_is_given_up_is_no_failure(guard: Guard) -> None:
    tried: list[float] = []
    run = guard(lambda: integrated(tried))
    assert run.faults == 0, run.stderr
    assert not all(map(math.isfinite, tried))
    assert not run.report.incidents, run.stderr


def test_one_that_ends_the_script_is_told(guard: Guard) -> None:
    def body() -> None:
        with pytest.raises(SystemExit):
            integrated([], stops=True)

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert [incident.severity for incident in run.report.incidents] == ["error"]
    assert "pow(2)" in run.report.incidents[0].location.code


def sampled(refused: list[int], accepts_all: bool = False) -> None:
    """Langevin moves of positions along an energy, one of them far too long; a model is fitted to them."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    positions = torch.randn(32, 2)
    for step in range(8):
        at = positions
        for move in range(4):
            at = at.detach().requires_grad_(True)
            energy = (at.square().sum(1).exp() + model(at).square().sum(1)).sum()
            (force,) = torch.autograd.grad(energy, at)
            at = at.detach() - (1e4 if step == 4 and move == 1 else 1e-3) * force
        good = at.isfinite().all(1)
        refused.append(int((~good).sum()))
        positions = at if accepts_all else torch.where(good[:, None], at, positions).clamp(-2, 2)
        loss = model(positions).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_move_of_a_sampler_that_is_given_up_is_no_failure(guard: Guard) -> None:
    refused: list[int] = []
    run = guard(lambda: sampled(refused))
    assert run.faults == 0, run.stderr
    assert sum(refused) > 0
    assert not run.report.incidents, run.stderr


def test_one_that_is_accepted_is_told(guard: Guard) -> None:
    run = guard(lambda: sampled([], accepts_all=True))
    assert run.faults == 0, run.stderr
    assert run.first.step == 4
    assert run.first.severity == "error"
    assert ".exp()" in run.first.location.code or "force" in run.first.location.code, run.first.location


def dreamt(refused: list[int], asks: bool) -> None:
    """An input that a trained model likes best; the script asks whether each trial is a number (or only shows it)."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    model.eval()
    x, size = torch.zeros(1, 4), 1e4

    def liked(at: Tensor) -> Tensor:
        return model(at).sum() - at.exp().sum()

    for _ in range(12):
        x = x.detach().requires_grad_(True)
        value = liked(x)
        (slope,) = torch.autograd.grad(value, x)
        with torch.no_grad():
            trial = liked(x - size * slope)
        if not asks:
            print(trial.item())
        elif torch.isfinite(trial) and trial > value:
            x = x.detach() - size * slope
            continue
        refused.append(not math.isfinite(float(trial)) if not asks else 1)
        size /= 8


@pytest.mark.parametrize("asks", [True, False])
def test_a_trial_that_the_script_asks_about_is_no_failure(guard: Guard, asks: bool) -> None:
    refused: list[int] = []
    run = guard(lambda: dreamt(refused, asks))
    assert run.faults == 0, run.stderr
    assert any(refused)
    assert bool(run.report.incidents) is not asks, run.stderr
