"""Weights that are plain tensors: no module, no optimizer, the script updates them in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from watching import Watched

BAD, STEPS = 5, 9


def layer(*shape: int) -> Tensor:
    return (torch.randn(*shape) * 0.5).requires_grad_()


def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    rate = (torch.tanh(x @ weights["w"]) @ weights["v"]).exp().squeeze(-1)
    return (rate - y * rate.log() + rate * y.log()).mean()


def train(by_backward: bool) -> None:
    weights = {"w": layer(3, 8), "v": layer(8, 1)}
    for step in range(STEPS):
        x, y = torch.rand(12, 3), torch.rand(12) + 0.1
        if step == BAD:
            y[4] = -1.0
        loss = loss_of(weights, x, y)
        if by_backward:
            loss.backward()
            slopes = [w.grad for w in weights.values()]
        else:
            slopes = list(torch.autograd.grad(loss, list(weights.values())))
        with torch.no_grad():
            for weight, slope in zip(weights.values(), slopes, strict=True):
                weight -= 0.01 * slope
                weight.grad = None


@pytest.mark.parametrize("by_backward", [False, True])
def test_loss_and_what_follows_from_it(by_backward: bool, guard: Callable[..., Watched]) -> None:
    run = guard(lambda: train(by_backward))
    (incident,) = run.report.incidents
    assert (incident.step, incident.phase, incident.cause) == (BAD, "loss", "domain-error")
    assert incident.location is not None
    assert "y.log()" in incident.location.code
    assert incident.evidence["rung"] == "replay"
    assert any(fix.verified for fix in incident.fixes)
    assert incident.evidence["later_failures_caused_by_it"] >= 1
    assert not run.faults


def test_gradient_that_nobody_looks_at(guard: Callable[..., Watched]) -> None:
    """A singular gradient of plain tensors is seen one step later. Nothing may be said of gradients that were not seen."""

    def body() -> None:
        weight = torch.randn(5, 4, requires_grad=True)
        for step in range(STEPS):
            a, b = torch.randn(8, 5), torch.randn(8, 5)
            if step == BAD:
                b[2] = a[2]
            weight.grad = None
            ((a - b) @ weight).pow(2).sum(1).sqrt().mean().backward()
            assert weight.grad is not None
            weight.data.add_(weight.grad, alpha=-0.01)

    (incident,) = guard(body).report.incidents
    assert "the gradients of that update were finite" not in incident.explanation
    assert "optimizer's own arithmetic" not in incident.explanation
