"""Gaps in the targets that the loss masks behind an operator whose derivative makes NaN of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
Loss = Callable[[Tensor, Tensor], Tensor]


def squared(pred: Tensor, real: Tensor) -> Tensor:
    loss = (pred - real) ** 2
    return loss[~torch.isnan(real)].mean()


def repaired(pred: Tensor, real: Tensor) -> Tensor:
    loss = (pred - torch.nan_to_num(real)) ** 2
    return loss[~torch.isnan(real)].mean()


def by_where(pred: Tensor, real: Tensor) -> Tensor:
    off = (real - pred).pow(2)
    return torch.where(real.isfinite(), off, torch.zeros(())).mean()


def train(loss_of: Loss, gap: float = float("nan")) -> bool:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        x = torch.randn(6, 4)
        y = x[:, :2].clone()
        if step == 3:
            y = torch.tensor([[0.5, gap], [1.0, 2.0], [gap, 0.1], [0.3, 0.2], [0.1, 0.4], [0.6, 0.9]])
        opt.zero_grad()
        loss = loss_of(net(x), y)
        assert loss.isfinite() or step > 3
        loss.backward()
        opt.step()
    return all(bool(p.isfinite().all()) for p in net.parameters())


@pytest.mark.parametrize(
    ("loss_of", "gap", "written"),
    [
        (squared, float("nan"), "torch.nan_to_num(real) in place of real in: loss = (pred - real) ** 2"),
        (
            by_where,
            float("inf"),
            "torch.nan_to_num(real, posinf=0.0, neginf=0.0) in place of real in: off = (real - pred)",
        ),
    ],
)
def test_the_line_that_meets_the_gap(loss_of: Loss, gap: float, written: str, guard: Guard) -> None:
    incident = guard(lambda: train(loss_of, gap)).report.incidents[0]
    assert (incident.step, incident.op) == (3, "aten.sub.Tensor")
    assert incident.location is not None
    assert incident.location.function == loss_of.__name__
    fix = incident.fixes[0]
    assert (fix.action, fix.verified) == ("stable-form", True)
    assert written in fix.how


def test_the_text_cures(guard: Guard) -> None:
    assert not train(squared)
    assert train(repaired)
    assert guard(lambda: train(repaired)).report.incidents == ()


def test_a_derivative_that_keeps_the_gap(guard: Guard) -> None:
    """A loss function of PyTorch's: whatever is proposed first is not called verified unless its gradients are finite."""

    def loss_of(pred: Tensor, real: Tensor) -> Tensor:
        return F.mse_loss(pred, real, reduction="none")[~real.isnan()].mean()

    incident = guard(lambda: train(loss_of)).report.incidents[0]
    assert incident.step == 3
    fix = next(f for f in incident.fixes if f.action == "stable-form")
    assert "torch.nan_to_num(real) in place of real" in fix.how
