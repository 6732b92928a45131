"""Gradients that the script computes itself, between backward and the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

Guard = Callable[..., Any]
BAD = 6


def train(change: Callable[[list[Tensor]], None], scaler: GradScaler | None = None, root: bool = False) -> None:
    """In step 6 no sample counts: the loss and all gradients are 0."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(9):
        inputs, weights = torch.randn(7, 5), torch.full((7,), float(step != BAD))
        errors = (net(inputs).squeeze(1) - inputs[:, 0]).abs() * weights
        loss = errors.pow(2).sum().sqrt() if root else errors.mean()
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        change(parameters)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def norm_of(parameters: Iterable[Tensor]) -> Tensor:
    return torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()


def scale_in_place(parameters: list[Tensor]) -> None:
    factor = 1.0 / norm_of(parameters)
    for parameter in parameters:
        parameter.grad.mul_(factor)  # type: ignore[union-attr]


def assign(parameters: list[Tensor]) -> None:
    norm = norm_of(parameters)
    for parameter in parameters:
        parameter.grad = parameter.grad / norm  # type: ignore[operator]


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("change", [scale_in_place, assign])
def test_the_line_that_made_them_bad_is_named(
    change: Callable[[list[Tensor]], None], scales: bool, guard: Guard
) -> None:
    run = guard(lambda: train(change, GradScaler("cpu", init_scale=64.0) if scales else None))
    assert (run.first.cause, run.first.step) == ("division-by-zero", BAD)
    assert run.first.location.function == change.__name__
    assert any(fix.verified for fix in run.first.fixes)
    assert "nonfinite-parameter" not in run.causes


def test_gradients_that_backward_made_bad_are_told_there(guard: Guard) -> None:
    run = guard(lambda: train(scale_in_place, root=True))
    assert (run.first.cause, run.first.step, run.first.phase) == ("singular-gradient", BAD, "backward")


def test_pytorchs_own_clipping_is_nothing_of_the_scripts(guard: Guard) -> None:
    run = guard(lambda: train(lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0) and None))
    assert not run.session._recorder.gradients.remade.are_used
    assert not run.report.incidents
