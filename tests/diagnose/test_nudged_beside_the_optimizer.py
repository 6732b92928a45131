"""Weights that the script moves itself along scaled gradients, though an optimizer holds them and steps as well."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
SCALE = 512.0


@pytest.fixture(autouse=True)
def no_collection_in_between() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def train(move: Callable[[nn.Parameter, float], None], first: int) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for step in range(48):
            x = torch.randn(12, 6)
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(x)
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(out.float(), x[:, :2])).backward()
            with torch.no_grad():
                for p in net.parameters() if step >= first else ():
                    move(p, SCALE)
            scaler.step(optimizer)
            scaler.update()

    return body


def along_scaled(p: nn.Parameter, scale: float) -> None:
    assert p.grad is not None
    p.sub_(1e-6 * p.grad)


def along_true(p: nn.Parameter, scale: float) -> None:
    assert p.grad is not None
    p.sub_(1e-3 * (p.grad / scale))


def decay(p: nn.Parameter, scale: float) -> None:
    p.mul_(1 - 1e-3)


def ascend(p: nn.Parameter, scale: float) -> None:
    assert p.grad is not None
    p.add_(p.grad * (0.01 / p.grad.norm()))


def descend(p: nn.Parameter, scale: float) -> None:
    """By a round number in the first iteration that is looked at, and by another in the next: to a length that is given."""
    assert p.grad is not None
    if p.shape not in SIZES:
        SIZES[p.shape] = float(p.grad.norm())
    p.sub_(p.grad * (1e-6 * SIZES[p.shape] / p.grad.norm()))


SIZES: dict[torch.Size, float] = {}


@pytest.mark.parametrize("first", [0, 41])
def test_moved_along_scaled_gradients(first: int, guard: Guard) -> None:
    run = guard(train(along_scaled, first))
    assert run.faults == 0, run.stderr
    assert run.first.cause == "bypassed-scaler"
    assert (run.first.step, run.first.evidence["factor"]) == (first, SCALE)
    assert run.first.location.code == "p.sub_(1e-6 * p.grad)"


@pytest.mark.parametrize("move", [along_true, decay, ascend, descend])
def test_moved_otherwise(move: Callable[[nn.Parameter, float], None], guard: Guard) -> None:
    train(move, 0)()  # (what the first gradients are is not read in the run that is watched)
    run = guard(train(move, 0))
    assert (run.faults, run.causes) == (0, [])
