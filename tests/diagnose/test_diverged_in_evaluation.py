"""A learning rate that is far too high shows first in the evaluation that follows: training steps are still finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from watching import seed_everything

Guard = Callable[..., Any]


def epochs(rate: float, steps: int, largest_input: float = 1.0) -> None:
    """Train on small inputs in float32, and evaluate on larger ones."""
    seed_everything()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(2):
        model.train()
        for _ in range(steps):
            loss = model(torch.randn(16, 8) * 1e-2).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            print(model(torch.randn(16, 8) * largest_input).square().mean().item())


def test_it_is_told_as_divergence(guard: Guard) -> None:
    run = guard(lambda: epochs(rate=1e10, steps=1))
    assert (run.first.cause, run.first.mode) == ("divergence", "eval"), run.stderr
    assert run.first.evidence["ended_as"] == "overflow"
    assert {fix.action for fix in run.first.fixes} == {"lower-learning-rate", "clip-gradients"}


def test_large_input_at_evaluation_is_none(guard: Guard) -> None:
    run = guard(lambda: epochs(rate=1e-3, steps=3, largest_input=1e25))
    assert (run.first.cause, run.first.mode) == ("overflow", "eval"), run.stderr


def evaluated_in_half(rate: float, factor: float) -> torch.optim.Optimizer:
    """Train in float32, evaluate under autocast."""
    seed_everything()
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(3, (16,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        print(model(torch.randn(16, 8) * factor).float().abs().mean().item())
    return optimizer


def test_evaluation_in_float16_of_weights_that_were_thrown_away_in_float32(guard: Guard) -> None:
    run = guard(lambda: evaluated_in_half(rate=30.0, factor=1.0))
    assert (run.first.cause, run.first.mode) == ("divergence", "eval"), run.stderr
    assert run.first.evidence["ended_as"] == "fp16-overflow"


def test_evaluation_in_float16_of_healthy_weights_is_none(guard: Guard) -> None:
    run = guard(lambda: evaluated_in_half(rate=1e-3, factor=1e6))
    assert (run.first.cause, run.first.mode) == ("fp16-overflow", "eval"), run.stderr
