"""Buffers that the calls of a held-off step have changed (running statistics) are as if the step had not been."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from override_loops import batches
from torch import Tensor, nn


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def state(module: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in module.state_dict().values()]


def train(bad: set[int], leave_out: bool = False, every: int = 1, scaled: bool = False) -> nn.Module:
    """`bad`: iterations whose batch holds NaN; `leave_out`: not taken, with all others of their window of `every`."""
    net = normed()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    windows = {step // every for step in bad}
    for step, (x, y) in enumerate(batches(8)):
        if leave_out and step // every in windows:
            continue
        if step in bad:
            x = x.clone()
            x[1, 2] = float("nan")
        scaler.scale(nn.functional.cross_entropy(net(x), y)).backward()
        if step % every == every - 1:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return net


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("policy", ["skip", "heal"])
def test_statistics_are_those_without_the_step(
    overridden: Callable[..., Any], policy: str, every: int, scaled: bool
) -> None:
    control = train({3}, leave_out=True, every=every, scaled=scaled)
    with overridden(on_nonfinite=policy):
        net = train({3}, every=every, scaled=scaled)
    assert all(torch.equal(a, b) for a, b in zip(state(net), state(control), strict=True))


def test_a_teachers_statistics_are_cured(overridden: Callable[..., Any]) -> None:
    with overridden(on_nonfinite="skip"):
        net = normed()
        teacher = copy.deepcopy(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step, (x, _) in enumerate(batches(4)):
            x = x * float("nan") if step == 2 else x
            with torch.no_grad():
                wanted = teacher(x)
            nn.functional.mse_loss(net(x), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.isfinite(value).all() for value in (*state(net), *state(teacher)))


def test_statistics_that_the_script_computes_anew_stay(overridden: Callable[..., Any]) -> None:
    (x, y), (again, _), *_ = batches(3)
    with overridden(on_nonfinite="skip"):
        net = normed()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with torch.no_grad():
            net(again)
        wanted = state(net)
        nn.functional.cross_entropy(net(x * float("nan")), y).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(state(net), wanted, strict=True))


def test_statistics_of_a_good_batch_stay_while_the_loss_scale_falls(overridden: Callable[..., Any]) -> None:
    x, y = batches(1)[0]
    with overridden(on_nonfinite="skip") as session:
        net = normed()
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler.scale(nn.functional.cross_entropy(net(x), y)).backward()
        net[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    assert session.report.run["steps_held_off"] == 1
    assert net[1].num_batches_tracked == 1
