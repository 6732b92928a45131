"""Losses that a script finds to be bad and puts others in the place of, before it differentiates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
Losses = dict[str, Tensor]


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6))

    def forward(self, x: Tensor) -> Losses:
        z = self.body(x)
        apart = (x[::2] - x[1::2]).norm(dim=1)
        slope = (z[::2] - z[1::2]).sum(1).abs() / apart
        return {"rec": (z - x).pow(2).mean(), "slope": slope.mean()}


def train(total: Callable[[Losses], Tensor], at: tuple[int, ...] = (8, 15)) -> None:
    torch.manual_seed(0)
    net = Pairs()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(24):
        x = torch.randn(16, 6)
        if step in at:
            x[3] = x[2]
        loss = total(net(x))
        opt.zero_grad()
        loss.backward()
        opt.step()


def zeros_for_a_term(losses: Losses) -> Tensor:
    for name, loss in losses.items():
        if torch.isnan(loss):
            losses[name] = torch.zeros_like(loss)
    return losses["rec"] + losses["slope"]


def without_the_term(losses: Losses) -> Tensor:
    return sum((loss for loss in losses.values() if loss.isfinite()), torch.zeros(()))


def nothing_at_all(losses: Losses) -> Tensor:
    loss = losses["rec"] + losses["slope"]
    if not torch.isfinite(loss):
        loss = torch.zeros((), requires_grad=True)
    return loss


@pytest.mark.parametrize("total", [zeros_for_a_term, without_the_term, nothing_at_all])
def test_a_loss_that_is_left_out(total: Callable[[Losses], Tensor], guard: Guard) -> None:
    run = guard(lambda: train(total))
    assert run.faults == 0
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity, incident.step) == ("division-by-zero", "warning", 8)
    assert incident.location.code.startswith("slope = ")
    assert incident.occurrences == 2
    assert ("add-epsilon", True) in {(fix.action, fix.verified) for fix in incident.fixes}


def a_figure_of_the_loss(losses: Losses) -> Tensor:
    shown = (losses["rec"] * 1e4).exp()
    if shown.isfinite():
        shown = shown + 1
    return losses["rec"]


def a_figure_of_a_term(losses: Losses) -> Tensor:
    shown = (losses["rec"] * 1e4).exp()
    loss = losses["rec"] + losses["slope"]
    return loss if shown.isfinite() else 1.0 * loss


def a_figure_beside(losses: Losses) -> Tensor:
    shown = losses["rec"].detach() * (losses["slope"] - losses["slope"]).reciprocal().log()
    if torch.isinf(shown):
        shown = torch.zeros(())
    return 1.0 * losses["rec"]


@pytest.mark.parametrize("total", [a_figure_of_the_loss, a_figure_of_a_term, a_figure_beside])
def test_a_figure_is_no_loss(total: Callable[[Losses], Tensor], guard: Guard) -> None:
    run = guard(lambda: train(total, at=()))
    assert run.faults == 0
    assert not run.report.incidents
