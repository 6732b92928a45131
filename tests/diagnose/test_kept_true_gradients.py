"""True gradients of an earlier pass that a script adds to gradients which carry the loss scale, or to others of their kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
Join = Callable[[nn.Parameter, Tensor], None]
SCALE = 4096.0


def rehearsed(join: Join, scales_both: bool = False, unscales: bool = False) -> Callable[[], None]:
    """In each iteration one pass over kept samples, whose gradients are joined with those of new ones."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

        def loss(column: int) -> Tensor:
            x = torch.randn(16, 8)
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(x)
            return F.cross_entropy(out.float(), (x[:, column] > 0).long())

        for _ in range(8):
            optimizer.zero_grad()
            of_kept = loss(2)
            (scaler.scale(of_kept) if scales_both else of_kept).backward()
            reference = [p.grad.clone() for p in net.parameters() if p.grad is not None]
            optimizer.zero_grad()
            scaler.scale(loss(0)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            for p, r in zip(net.parameters(), reference, strict=True):
                join(p, r)
            scaler.step(optimizer)
            scaler.update()

    return body


def in_place(p: nn.Parameter, r: Tensor) -> None:
    assert p.grad is not None
    p.grad.add_(r, alpha=0.5)


def anew(p: nn.Parameter, r: Tensor) -> None:
    assert p.grad is not None
    p.grad = p.grad + 0.5 * r


def projected(p: nn.Parameter, r: Tensor) -> None:
    """A-GEM: off what would undo the kept ones. The reference's own size cancels."""
    assert p.grad is not None
    along = (p.grad * r).sum()
    if along < 0:
        p.grad -= along / (r * r).sum() * r


@pytest.mark.parametrize("join", [in_place, anew])
def test_true_gradients_that_the_scaler_divides(guard: Guard, join: Join) -> None:
    run = guard(rehearsed(join))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.severity) == ("unscaled-backward", "error")
    assert run.first.location.function == join.__name__
    assert run.first.evidence["factor"] == 1 / SCALE
    assert run.first.step <= 1


@pytest.mark.parametrize("join", [in_place, anew, projected])
@pytest.mark.parametrize("how", ["both scaled", "unscaled first"])
def test_gradients_of_one_kind(guard: Guard, join: Join, how: str) -> None:
    run = guard(rehearsed(join, scales_both=how == "both scaled", unscales=how == "unscaled first"))
    assert run.faults == 0, run.stderr
    assert run.causes == []


def test_a_reference_whose_size_cancels(guard: Guard) -> None:
    run = guard(rehearsed(projected))
    assert run.faults == 0, run.stderr
    assert run.causes == []
