"""Modules that differentiate in their own forward pass (forces from an energy): the derivative may be bad in there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

ROOT = "dist = (x[:, :, None] - x[:, None]).square().sum(-1).sqrt()"


class Pairs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        dist = (x[:, :, None] - x[:, None]).square().sum(-1).sqrt()
        return dist + torch.eye(x.shape[1])


class Forces(nn.Module):
    """Energy and forces of a few points; the distance of a point from itself is left in, times 0."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = Pairs()
        self.net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))

    def energy(self, x: Tensor) -> Tensor:
        dist = self.pairs(x)
        return self.net(dist[..., None]).sum((1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


class Functional(Forces):
    def forward(self, x: Tensor) -> Tensor:
        return -torch.func.grad(lambda x: self.energy(x).sum())(x)


def loop(kind: type[Forces]) -> None:
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(3):
        loss = model(torch.randn(4, 3, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [Forces, Functional])
def test_training(kind: type[Forces], guard: Callable[..., Watched]) -> None:
    run = guard(lambda: loop(kind))
    first = run.report.incidents[0]
    assert (first.step, first.cause, first.module) == (0, "singular-gradient", "pairs")
    assert first.location is not None
    assert first.location.code == ROOT
    assert [(fix.action, fix.verified) for fix in first.fixes] == [("add-epsilon", True), ("clamp", True)]
    assert not run.faults


def evaluate() -> None:
    model = Forces().eval()
    with torch.no_grad():
        model(torch.randn(4, 3, 2))


def test_evaluation(guard: Callable[..., Watched]) -> None:
    run = guard(evaluate)
    first = run.report.incidents[0]
    assert (first.mode, first.cause, first.module) == ("eval", "singular-gradient", "pairs")
    assert first.location is not None
    assert first.location.code == ROOT
    assert not run.faults


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)  # type: ignore[attr-defined]
        return x.abs() * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        sign = x / x.abs()
        return 2 * grad * sign


class WithOwn(Forces):
    def energy(self, x: Tensor) -> Tensor:
        return self.net(Own.apply(x[:, :, :1] - x[:, :1, :1])).sum((1, 2))


def test_line_of_a_function_of_the_scripts_own(guard: Callable[..., Watched]) -> None:
    run = guard(lambda: loop(WithOwn))
    first = run.report.incidents[0]
    assert first.location is not None
    assert first.location.code == "sign = x / x.abs()"
    assert not run.faults
