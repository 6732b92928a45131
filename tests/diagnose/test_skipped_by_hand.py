"""Loops without optimizer and scaler whose own loss scale is too high at first: they skip these steps, or do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
Update = Callable[[list[Tensor], list[Tensor]], None]


def in_place(parameters: list[Tensor], gradients: list[Tensor]) -> None:
    with torch.no_grad():
        for p, g in zip(parameters, gradients, strict=True):
            p -= 0.05 * g


def through_data(parameters: list[Tensor], gradients: list[Tensor]) -> None:
    for p, g in zip(parameters, gradients, strict=True):
        p.data.add_(g, alpha=-0.05)


def train(update: Update, looks: bool, steps: int = 12) -> float:
    """`looks`: whether it skips a step whose gradients are not finite."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
    scale, good = 2.0**22, 0
    parameters = list(net.parameters())
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(torch.randn(64, 32)), torch.randint(0, 10, (64,)))
        (loss * scale).backward()
        gradients = [p.grad / scale for p in parameters]
        if not looks or all(bool(g.isfinite().all()) for g in gradients):
            update(parameters, [g.clamp(-1, 1) for g in gradients])
            good += 1
        else:
            scale, good = scale / 2, 0
        if good == 4:
            scale, good = scale * 2, 0
        for p in parameters:
            p.grad = None
    assert not looks or all(bool(p.isfinite().all()) for p in parameters)
    return loss.item()


@pytest.mark.parametrize("update", [in_place, through_data])
def test_a_scale_that_settles_is_normal(update: Update, guard: Guard) -> None:
    run = guard(lambda: train(update, looks=True))
    assert run.faults == 0
    assert run.report.incidents
    for incident in run.report.incidents:
        assert (incident.cause, incident.severity) == ("loss-scale-overflow", "info")
    assert run.first.step == 0
    assert run.first.occurrences > 3


@pytest.mark.parametrize("update", [in_place, through_data])
def test_steps_that_are_made_all_the_same_are_an_error(update: Update, guard: Guard) -> None:
    run = guard(lambda: train(update, looks=False))
    assert run.faults == 0
    assert (run.first.cause, run.first.severity, run.first.step) == ("loss-scale-overflow", "error", 0)
    (lower,) = [fix for fix in run.first.fixes if fix.action == "lower-loss-scale"]
    assert lower.verified is True


def test_the_last_step_of_all(guard: Guard) -> None:
    run = guard(lambda: train(in_place, looks=False, steps=1))
    assert (run.first.cause, run.first.severity, run.first.step) == ("loss-scale-overflow", "error", 0)


def functional(skips: bool, by: str, steps: int = 12) -> None:
    """Weights that each step makes anew; a step that is skipped hands the old ones on. The scale is raised once, by far."""
    torch.manual_seed(0)
    weights = [torch.randn(32, 64) / 6, torch.zeros(64), torch.randn(64, 10) / 8]
    scale = torch.tensor(2.0**10)

    def loss_of(weights: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        a, b, c = (w.half() for w in weights)
        hidden = nn.functional.gelu(x.half() @ a + b)
        return nn.functional.cross_entropy((hidden @ c).float(), y) * scale

    for step in range(steps):
        scale = torch.tensor(2.0**26) if step == 3 else scale
        x, y = torch.randn(64, 32), torch.randint(0, 10, (64,))
        if by == "torch.func":
            gradients = torch.func.grad(loss_of)(weights, x, y)
        else:
            weights = [w.detach().requires_grad_() for w in weights]
            gradients = torch.autograd.grad(loss_of(weights, x, y), weights)
        gradients = [g / scale for g in gradients]
        is_good = torch.stack([g.isfinite().all() for g in gradients]).all()
        updated = [w.detach() - 0.05 * g.nan_to_num(1.0, 1.0, -1.0) for w, g in zip(weights, gradients, strict=True)]
        if skips:
            weights = [torch.where(is_good, new, w.detach()) for new, w in zip(updated, weights, strict=True)]
            scale = torch.where(is_good, scale, scale / 4)
        else:
            weights = updated


@pytest.mark.parametrize("by", ["torch.func", "autograd.grad"])
def test_without_a_branch(by: str, guard: Guard) -> None:
    run = guard(lambda: functional(True, by))
    assert run.faults == 0
    assert [(i.cause, i.severity) for i in run.report.incidents] == [("loss-scale-overflow", "info")]
    assert run.first.occurrences > 2


@pytest.mark.parametrize("by", ["torch.func", "autograd.grad"])
def test_weights_that_are_made_anew_all_the_same(by: str, guard: Guard) -> None:
    run = guard(lambda: functional(False, by))
    assert run.faults == 0
    assert (run.first.cause, run.first.severity, run.first.step) == ("loss-scale-overflow", "error", 3)
    assert any(fix.action == "lower-loss-scale" and fix.verified for fix in run.first.fixes)
