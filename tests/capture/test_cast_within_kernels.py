"""Operators that autocast does not cast itself, and whose kernels call matrix products that it does cast: under a dispatch
mode of ours they would come to float32 ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

Guard = Callable[..., Any]


@torch.library.custom_op("ampguard_tests::mixed", mutates_args=())
def mixed(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T).float() @ y


def turned(images: Tensor) -> Tensor:
    """A random rotation, as augmentations have it."""
    angle = torch.rand(images.shape[0])
    rows = torch.stack([angle.cos(), -angle.sin(), torch.zeros_like(angle)], 1)
    theta = torch.stack([rows, rows.flip(1)], 1)
    grid = functional.affine_grid(theta, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid.float(), align_corners=False)


def crossed(images: Tensor) -> Tensor:
    rows = images.flatten(1)
    return functional.bilinear(rows, rows.flip(0), torch.linspace(-1, 1, 16 * 16 * 16).view(16, 16, 16)).float()


def declared(images: Tensor) -> Tensor:
    rows = images.flatten(1)
    return mixed(rows, rows.flip(0))


def inverted(images: Tensor) -> Tensor:
    return torch.linalg.pinv(images[:, 0]).float()


KINDS = [turned, crossed, declared, inverted]


def training(prepared: Callable[[Tensor], Tensor], steps: int, outlier_in: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for step in range(steps):
        images = torch.rand(6, 1, 4, 4)
        with torch.autocast("cpu", dtype=torch.float16):
            x = prepared(images)
            out = model(x.flatten(1).tanh()) * (1e7 if step == outlier_in else 1.0)
            loss = out.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [x, loss.detach()]
    return [*seen, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("prepared", KINDS)
def test_such_an_operator_is_cast_as_without_a_guard(prepared: Callable[[Tensor], Tensor], guard: Guard) -> None:
    plain = training(prepared, 40)
    run = guard(lambda: training(prepared, 40))
    assert run.faults == 0, run.stderr
    assert not run.report.incidents
    assert all(torch.equal(a, b) for a, b in zip(plain, run.result, strict=True))


@pytest.mark.parametrize("at", [3, 38])
@pytest.mark.parametrize("prepared", KINDS)
def test_so_it_is_in_a_replay(prepared: Callable[[Tensor], Tensor], at: int, guard: Guard) -> None:
    run = guard(lambda: training(prepared, 40, outlier_in=at))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == ("fp16-overflow", at)
    assert "not bit for bit" not in run.first.explanation
    assert "not bit for bit" not in run.stderr
