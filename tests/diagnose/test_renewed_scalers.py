"""A GradScaler that is made anew before its scale has come down: every step is skipped, and nothing says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
LARGE = 2000.0
"""Targets of this size overflow float16 at a scale of 65536, and fit at 16."""


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(32, 8), torch.randn(32) * LARGE


def model() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return net, torch.optim.Adam(net.parameters(), 1e-3)


def step(net: nn.Module, opt: torch.optim.Optimizer, scaler: Any, is_singular: bool = False) -> None:
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x).squeeze(-1)
    loss = nn.functional.mse_loss(out.float(), y)
    if is_singular:
        loss = loss + (out.float() * 0).sum().sqrt()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()


def renewed(steps_each: int, times: int, shrinks: float = 1.0, is_singular: bool = False) -> None:
    torch.manual_seed(0)
    net, opt = model()
    for number in range(times):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16 * shrinks**number)
        for _ in range(steps_each):
            step(net, opt, scaler, is_singular)


def told(run: Any) -> list[tuple[str, str]]:
    return [(i.cause, i.severity) for i in run.report.incidents]


@pytest.mark.parametrize(("steps_each", "times"), [(1, 12), (4, 5)])
def test_made_anew(steps_each: int, times: int, guard: Guard) -> None:
    (incident,) = guard(lambda: renewed(steps_each, times)).report.incidents
    assert (incident.cause, incident.severity, incident.step) == ("missing-update", "error", 0)
    assert "GradScaler" in incident.location.code
    assert [fix.action for fix in incident.fixes] == ["call-order", "lower-loss-scale"]
    assert incident.fixes[1].verified


def test_begins_lower_each_time(guard: Guard) -> None:
    assert ("missing-update", "error") not in told(guard(lambda: renewed(1, 20, shrinks=0.5)))


def test_comes_down_each_time(guard: Guard) -> None:
    assert told(guard(lambda: renewed(20, 3))) == [("loss-scale-overflow", "info")]


def test_no_scale_would_help(guard: Guard) -> None:
    assert told(guard(lambda: renewed(1, 12, is_singular=True))) == [("singular-gradient", "error")]


@pytest.mark.slow
def test_one_for_each_of_many_models(guard: Guard) -> None:
    def agents() -> None:
        torch.manual_seed(0)
        teams = [(*model(), torch.amp.GradScaler("cpu")) for _ in range(10)]
        for _ in range(20):
            for team in teams:
                step(*team)

    assert all(severity == "info" for _, severity in told(guard(agents)))


@pytest.mark.slow
def test_one_for_each_model_after_another(guard: Guard) -> None:
    def folds() -> None:
        torch.manual_seed(0)
        for _ in range(4):
            net, opt = model()
            scaler = torch.amp.GradScaler("cpu")
            for _ in range(20):
                step(net, opt, scaler)

    assert all(severity == "info" for _, severity in told(guard(folds)))
