"""`steps=N` ends a run after N iterations, also where no module is called whose next call could end it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ampguard

BATCH, TARGET = torch.randn(12, 3), torch.randn(12, 1)


def loss_of(weight: Tensor) -> Tensor:
    return (BATCH @ weight - TARGET).square().mean()


def by_optimizer(made: list[int]) -> None:
    weight = torch.zeros(3, 1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    for step in range(20):
        optimizer.zero_grad()
        loss_of(weight).backward()
        optimizer.step()
        made.append(step)


def by_hand(made: list[int]) -> None:
    weight = torch.zeros(3, 1, requires_grad=True)
    for step in range(20):
        loss_of(weight).backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
        made.append(step)


def by_transform(made: list[int]) -> None:
    weight = torch.zeros(3, 1)
    for step in range(20):
        weight = weight - 0.1 * torch.func.grad(loss_of)(weight)
        made.append(step)


def by_slope(made: list[int]) -> None:
    weight = torch.zeros(3, 1)
    for step in range(20):
        direction = torch.randn_like(weight)
        _, slope = torch.func.jvp(loss_of, (weight,), (direction,))
        weight = weight - 0.01 * slope * direction
        made.append(step)


def by_written_gradients(made: list[int]) -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 1))
    optimizer = torch.optim.SGD([weight], 0.1)
    for step in range(20):
        noise = torch.randn(4, 3, 1)
        with torch.no_grad():
            weight.grad = sum(loss_of(weight + 0.1 * n) * n for n in noise)
        optimizer.step()
        made.append(step)


@pytest.mark.parametrize("train", [by_optimizer, by_hand, by_transform, by_slope, by_written_gradients])
def test_a_loop_without_modules_ends_after_the_steps_asked_for(
    train: Callable[[list[int]], None], tmp_path: Path
) -> None:
    made: list[int] = []
    with ampguard.watch(steps=5, out=tmp_path / "run") as session:
        train(made)
    assert made == [0, 1, 2, 3, 4]
    assert session.report is not None
    assert session.report.steps == 5
