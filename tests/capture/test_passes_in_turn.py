"""Loops without an optimizer that differentiate from several places in one iteration: it is one iteration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched

from ampguard.capture.steps import StepCounter

BAD = 6
STEPS = 9
Guard = Callable[..., Watched]


@pytest.mark.parametrize("turn", ["ab", "aab", "aaab", "abc", "a"])
def test_a_turn_is_an_iteration(turn: str) -> None:
    steps = StepCounter()
    for _ in range(20):
        for place in turn:
            steps.differentiated(place)
    assert steps.count == 20


def test_phases_are_no_turn() -> None:
    steps = StepCounter()
    for place in "a" * 30 + "b" * 30:
        steps.differentiated(place)
    assert steps.count in (59, 60)


def meta_learn(bad: int | None) -> None:
    """First-order: the inner steps are differentiated by themselves."""
    weights = [nn.Parameter(torch.randn(1, 8)), nn.Parameter(torch.zeros(8)), nn.Parameter(torch.randn(8, 1))]

    def of(x: Tensor, w: list[Tensor]) -> Tensor:
        return torch.tanh(x @ w[0] + w[1]) @ w[2]

    for step in range(STEPS):
        x = torch.randn(10, 1)
        y = x.sin()
        fast: list[Tensor] = list(weights)
        for _ in range(3):
            gradients = torch.autograd.grad(F.mse_loss(of(x, fast), y), fast)
            fast = [p - 0.01 * g for p, g in zip(fast, gradients, strict=True)]
        answer = of(x, fast) * (0 if step == bad else 1) + (y if step == bad else 0)
        outer = (answer - y).square().mean().sqrt()
        outer.backward()
        with torch.no_grad():
            for p in weights:
                p -= 0.01 * p.grad
                p.grad = None


def paint(bad: int | None) -> None:
    """Pixels that are trained through a frozen network, by two losses that are differentiated one after the other."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).requires_grad_(False)
    image, content = torch.rand(1, 3, 8, 8).requires_grad_(), torch.rand(1, 3, 8, 8)
    for step in range(STEPS):
        if step == bad:
            with torch.no_grad():
                image[..., :4, :4] = 0.5
        image.grad = None
        F.mse_loss(network(image), network(content)).backward()
        across, down = image[..., 1:, 1:] - image[..., :-1, 1:], image[..., 1:, 1:] - image[..., 1:, :-1]
        variation = (across.square() + down.square()).sqrt().mean()
        variation.backward()
        with torch.no_grad():
            image -= 0.05 * image.grad


@pytest.mark.parametrize("loop", [meta_learn, paint])
def test_the_step_of_a_failure(loop: Callable[[int | None], None], guard: Guard) -> None:
    run = guard(lambda: loop(BAD))
    incident = run.first
    assert run.report.steps == STEPS
    assert (incident.step, incident.cause, incident.phase) == (BAD, "singular-gradient", "backward")
    assert incident.location is not None
    assert ".sqrt()" in incident.location.code
    assert incident.fixes[0].verified
    assert not run.faults


@pytest.mark.parametrize("loop", [meta_learn, paint])
def test_nothing_is_said_of_a_healthy_one(loop: Callable[[int | None], None], guard: Guard) -> None:
    run = guard(lambda: loop(None))
    assert (run.report.steps, run.report.status) == (STEPS, "clean")
    assert not run.faults
