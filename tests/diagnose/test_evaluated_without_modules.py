"""Evaluations of models that are no modules: the number that the script reads is judged as that of any other model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Guard = Callable[..., Any]


def network(weights: list[Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ weights[0]) @ weights[1]


@torch.no_grad()
def validate(weights: list[Tensor], x: Tensor, square_of_mean: float) -> float:
    variance = x.square().mean(0) - square_of_mean
    return network(weights, x * torch.rsqrt(variance)).square().mean().item()  # <- here


def train(is_returned: bool, has_optimizer: bool, bad: int | None) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(4, 8).requires_grad_(), torch.randn(8, 1).requires_grad_()]
    optimizer = torch.optim.SGD(weights, 0.01) if has_optimizer else None
    for step in range(30):
        loss = network(weights, torch.randn(32, 4)).square().mean()
        for p in weights:
            p.grad = None
        if is_returned:
            for p, g in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                p.grad = g
        else:
            loss.backward()
        if optimizer is not None:
            optimizer.step()
        else:
            for p in weights:
                p.data.sub_(0.01 * p.grad)
        if step % 5 == 4:
            print(validate(weights, torch.randn(32, 4), 9.0 if step == bad else 0.0))
            print((weights[0].grad.std() / (0.0 * weights[0].detach()).std()).item())  # a figure of the weights: Inf


@pytest.mark.parametrize("has_optimizer", [True, False])
@pytest.mark.parametrize("is_returned", [True, False])
def test_the_line_that_made_it_bad(is_returned: bool, has_optimizer: bool, guard: Guard) -> None:
    run = guard(lambda: train(is_returned, has_optimizer, bad=19))
    assert run.faults == 0
    (incident,) = run.report.incidents
    assert (incident.cause, incident.mode, incident.op) == ("domain-error", "eval", "aten.rsqrt.default")
    assert incident.step == 20
    assert incident.location.code.endswith("# <- here")


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_figures_of_the_weights_are_none_of_an_evaluation(has_optimizer: bool, guard: Guard) -> None:
    run = guard(lambda: train(False, has_optimizer, bad=None))
    assert run.faults == 0
    assert not run.report.incidents
