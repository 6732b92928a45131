"""Bad gradients that a script makes finite before the scaler looks at them: the scale is never lowered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]
Change = Callable[[nn.Module], object]


def train(
    scale: float, before: Change = lambda net: None, after: Change = lambda net: None, unscales: bool = False
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = net(torch.randn(8, 4)).float().pow(2).mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        before(net)
        if unscales:
            scaler.unscale_(opt)
        after(net)
        scaler.step(opt)
        scaler.update()


def in_place(net: nn.Module) -> None:
    for p in net.parameters():
        torch.nan_to_num(p.grad, nan=0.0, posinf=1e5, neginf=-1e5, out=p.grad)


def by_a_mask(net: nn.Module) -> None:
    for p in net.parameters():
        if p.grad is not None:
            p.grad[~torch.isfinite(p.grad)] = 0.0


def anew(net: nn.Module) -> None:
    for p in net.parameters():
        p.grad = torch.nan_to_num(p.grad)


@pytest.mark.parametrize("change", [in_place, by_a_mask, anew])
def test_an_overflow_that_the_scaler_never_sees(change: Change, guard: Guard) -> None:
    run = guard(lambda: train(2.0**24, change))
    assert run.faults == 0
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity, incident.step) == ("loss-scale-overflow", "error", 0)
    assert "before the scaler looks at them" in incident.explanation
    assert ("lower-loss-scale", True) in {(fix.action, fix.verified) for fix in incident.fixes}
    assert "call-order" in {fix.action for fix in incident.fixes}


def causes(run: Any) -> set[tuple[str, str]]:
    assert run.faults == 0
    return {(i.cause, i.severity) for i in run.report.incidents}


def test_a_scaler_that_looks_first(guard: Guard) -> None:
    assert causes(guard(lambda: train(2.0**24, after=in_place, unscales=True))) == {("loss-scale-overflow", "info")}


def test_nothing_that_had_to_be_replaced(guard: Guard) -> None:
    assert causes(guard(lambda: train(256.0, in_place))) == set()


def test_clipping_that_hides_it_is_told_as_such(guard: Guard) -> None:
    clip = lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.5)  # noqa: E731
    found = causes(guard(lambda: train(2.0**24, clip)))
    assert [cause for cause, severity in found if severity != "info"] == ["clip-before-unscale"]


def outliers(change: Change, at: tuple[int, ...], unscales: bool = False) -> None:
    """Finite at first; some batches overflow, in iterations that are not looked at closely."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(24):
        x = torch.randn(8, 4) * (2e3 if step in at else 1.0)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = net(x).float().pow(2).mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(opt)
        change(net)
        scaler.step(opt)
        scaler.update()


@pytest.mark.parametrize("at", [(11,), (13, 14, 17, 21)])
@pytest.mark.parametrize("change", [in_place, by_a_mask, anew])
def test_the_first_overflow_that_is_hidden_is_told_in_its_step(
    change: Change, at: tuple[int, ...], guard: Guard
) -> None:
    run = guard(lambda: outliers(change, at))
    assert run.faults == 0
    found = run.first
    assert (found.cause, found.severity, found.step) == ("loss-scale-overflow", "error", at[0])
    assert "before the scaler looks at them" in found.explanation


@pytest.mark.parametrize("change", [in_place, by_a_mask, anew])
def test_cleaning_that_never_finds_anything(change: Change, guard: Guard) -> None:
    assert causes(guard(lambda: outliers(change, ()))) == set()


def test_an_overflow_that_the_scaler_sees_first(guard: Guard) -> None:
    run = guard(lambda: outliers(in_place, (11, 14), unscales=True))
    assert run.faults == 0
    assert run.report.incidents
    assert not any("before the scaler looks at them" in i.explanation for i in run.report.incidents)
