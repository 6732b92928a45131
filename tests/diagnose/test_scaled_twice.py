"""A loss that was scaled by two parts of a script: the scaler divides once, and one loss scale stays in the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]


class Engine:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-4)
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0)

    def encode(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            out: Tensor = self.net(x)
        return out.float()

    def loss(self) -> Tensor:
        return self.encode(torch.randn(16, 6)).square().mean()

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()


def helper_and_caller(engine: Engine) -> None:
    engine.backward(engine.scaler.scale(engine.loss()))


def weighted_in_between(engine: Engine) -> None:
    scaled = engine.scaler.scale(engine.loss())
    engine.backward((scaled + 0.0) / 2)


def cached_representations(engine: Engine) -> None:
    x = torch.randn(16, 6)
    with torch.no_grad():
        kept = engine.encode(x)
    kept.requires_grad_()
    engine.backward(F.cross_entropy(kept @ kept.T, torch.arange(16)))
    assert kept.grad is not None
    for part, gradient in zip(x.split(8), kept.grad.split(8), strict=True):
        engine.backward((engine.encode(part) * gradient).sum())


def train(iteration: Callable[[Engine], None]) -> None:
    engine = Engine()
    for _ in range(5):
        iteration(engine)
        engine.step()


@pytest.mark.parametrize("iteration", [helper_and_caller, weighted_in_between, cached_representations])
def test_scaled_twice(iteration: Callable[[Engine], None], guard: Guard) -> None:
    run = guard(lambda: train(iteration))

    assert run.faults == 0, run.stderr
    (incident,) = [i for i in run.report.incidents if i.severity != "info"]
    assert (incident.cause, incident.step) == ("bypassed-scaler", 0)
    assert incident.location.code == "self.scaler.scale(loss).backward()"
    assert "64 times too large" in incident.explanation
    assert "scale each loss once" in incident.fixes[0].how


def two_losses(engine: Engine) -> None:
    engine.backward(engine.loss())
    engine.backward(engine.loss())


def weights_of_samples(engine: Engine) -> None:
    x = torch.randn(16, 6, requires_grad=True)
    engine.backward(engine.encode(x).square().mean())
    assert x.grad is not None
    engine.backward((engine.encode(x.detach() + 0.1 * x.grad.sign()) * torch.rand(16, 1)).square().mean())


def taken_back(engine: Engine) -> None:
    scaled = engine.scaler.scale(engine.loss())
    engine.backward(engine.loss())
    del scaled


@pytest.mark.parametrize("iteration", [two_losses, weights_of_samples, taken_back])
def test_scaled_once_is_silent(iteration: Callable[[Engine], None], guard: Guard) -> None:
    run = guard(lambda: train(iteration))
    assert (run.faults, [i.cause for i in run.report.incidents if i.severity != "info"]) == (0, []), run.stderr
