"""Bad gradients in whose place a script puts finite ones before its optimizer uses them, without a scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]
Change = Callable[[nn.Module], object]


def train(change: Change, at: tuple[int, ...], clips: bool = False, steps: int = 24) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6))
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(steps):
        x = torch.randn(16, 6)
        if step in at:
            x[3] = x[2]
        z = net(x)
        loss = (z[::2] - z[1::2]).pow(2).sum(1).sqrt().mean()
        opt.zero_grad()
        loss.backward()
        change(net)
        if clips:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()


def in_place(net: nn.Module) -> None:
    for p in net.parameters():
        p.grad.nan_to_num_(0.0, 0.0, 0.0)


def anew(net: nn.Module) -> None:
    for p in net.parameters():
        p.grad = torch.nan_to_num(p.grad, 0.0, 0.0, 0.0)


def by_data(net: nn.Module) -> None:
    for p in net.parameters():
        p.grad.data[~torch.isfinite(p.grad.data)] = 0.0


def where_needed(net: nn.Module) -> None:
    if any(not torch.isfinite(p.grad).all() for p in net.parameters()):
        for p in net.parameters():
            p.grad.zero_()


def anew_where_needed(net: nn.Module) -> None:
    for p in net.parameters():
        if p.grad.isnan().any():
            p.grad = torch.zeros_like(p.grad)


@pytest.mark.parametrize("change", [in_place, anew, by_data, where_needed])
def test_in_every_step_nothing_is_learned(change: Change, guard: Guard) -> None:
    run = guard(lambda: train(change, tuple(range(24))))
    assert run.faults == 0
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity, incident.step) == ("singular-gradient", "error", 0)
    assert "in the place of such gradients" in incident.explanation
    assert incident.location.code.startswith("loss = (z[::2]")
    assert incident.occurrences >= 8
    assert {(fix.action, fix.verified) for fix in incident.fixes} >= {("add-epsilon", True)}


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("change", [in_place, anew, where_needed, anew_where_needed])
def test_late_and_seldom_it_is_told_in_its_step(change: Change, clips: bool, guard: Guard) -> None:
    run = guard(lambda: train(change, (11, 17), clips))
    assert run.faults == 0
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity, incident.step) == ("singular-gradient", "warning", 11)
    assert incident.occurrences == 2
    assert "The training went on (2 batches were lost)" in incident.explanation


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("change", [in_place, anew, by_data, where_needed])
def test_cleaning_that_never_finds_anything(change: Change, clips: bool, guard: Guard) -> None:
    run = guard(lambda: train(change, (), clips))
    assert run.faults == 0
    assert not run.report.incidents


def test_what_is_done_for_the_first_time_late_and_for_another_reason(guard: Guard) -> None:
    passes = iter(range(100))

    def halved_late(net: nn.Module) -> None:
        if next(passes) % 10 == 9:
            for p in net.parameters():
                p.grad.mul_(0.5)

    run = guard(lambda: train(halved_late, ()))
    assert run.faults == 0
    assert not run.report.incidents


def own_scale(change: Change) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(10):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(torch.randn(64, 32)), torch.randint(0, 10, (64,)))
        opt.zero_grad()
        (loss * 2.0**24).backward()
        change(net)
        for p in net.parameters():
            p.grad.div_(2.0**24)
        opt.step()


@pytest.mark.parametrize("change", [lambda net: None, in_place])
def test_a_scale_of_the_scripts_own_is_lowered_where_it_is(change: Change, guard: Guard) -> None:
    run = guard(lambda: own_scale(change))
    assert run.faults == 0
    incident = run.first
    assert (incident.cause, incident.severity, incident.step) == ("loss-scale-overflow", "error", 0)
    assert "scaler looks" not in incident.explanation
    assert ("in the place of such gradients" in incident.explanation) is (change is in_place)
    (lower,) = [fix for fix in incident.fixes if fix.action == "lower-loss-scale"]
    assert lower.verified is True
    assert lower.how.startswith("multiply the loss by at most ")
    assert "call-order" not in {fix.action for fix in incident.fixes}


def test_one_parameter_alone_is_bad_and_replaced(guard: Guard) -> None:
    """A ReLU keeps the bad gradients from the first layer; clipping follows."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 16, bias=False), nn.ReLU(), nn.Linear(16, 6, bias=False))
        opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for step in range(24):
            x = torch.randn(8, 10)
            if step == 14:
                x[0] = 0.0
            z = net(x)
            loss = ((z - z.mean(1, keepdim=True)).pow(2).mean(1).sqrt() - 1).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            anew_where_needed(net)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()

    run = guard(body)
    assert run.faults == 0
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity, incident.step) == ("singular-gradient", "warning", 14)
