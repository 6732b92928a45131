"""A line search looks at points without gradients; those outside a model's support it gives up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Backtracking(torch.optim.Optimizer):
    """Gradient descent whose step is halved until the loss has fallen."""

    def __init__(self, params: Any, first: float) -> None:
        super().__init__(params, {"first": first})
        self.refused: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            before: Tensor = closure(True)
        held = self.param_groups[0]["params"]
        old, slopes = [p.clone() for p in held], [p.grad.clone() for p in held]
        size = self.param_groups[0]["first"]
        for _ in range(20):
            for p, at, slope in zip(held, old, slopes, strict=True):
                p.copy_(at - size * slope)
            now = closure(False)
            if torch.isfinite(now) and now <= before:
                break
            self.refused.append(float(now))
            size /= 2
        return before


class Density(nn.Module):
    """Of a distribution that ends at a learned point: -inf beyond it."""

    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Linear(1, 1)
        nn.init.constant_(self.end.bias, 4.0)

    def forward(self, y: Tensor) -> Tensor:
        end = self.end(torch.ones_like(y)[:, None]).squeeze(1)
        inside = y < end
        width = torch.where(inside, end - y, torch.ones_like(y))
        return torch.where(inside, 2 * width.log() - 3 * end.log(), torch.full_like(y, -math.inf))


def fitted(first: float, steps: int = 8, evaluates: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = Density()
    y = torch.rand(64)
    optimizer = Backtracking(model.parameters(), first)

    def closure(with_grad: bool) -> Tensor:
        with torch.set_grad_enabled(with_grad):
            loss = -model(y).mean()
        if with_grad:
            optimizer.zero_grad()
            loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    if evaluates:
        model.eval()
        with torch.no_grad():
            print(float(-model(y + 10).mean()))
    return optimizer.refused


@pytest.mark.parametrize("first", [16.0, 4.0])
def test_a_point_that_is_given_up_is_no_failure(guard: Guard, first: float) -> None:
    refused: list[float] = []
    run = guard(lambda: refused.extend(fitted(first)))
    assert run.faults == 0, run.stderr
    assert math.inf in refused
    assert not run.report.incidents, run.stderr


def test_an_evaluation_behind_the_search_is_judged(guard: Guard) -> None:
    run = guard(lambda: fitted(16.0, evaluates=True))
    assert run.faults == 0, run.stderr
    assert [incident.mode for incident in run.report.incidents] == ["eval"]
