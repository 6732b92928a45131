"""Gradients of a second optimizer that a script divides itself, by the scale as it is after the scaler's update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


def trained(is_before: bool, grows: int, steps: int = 24) -> None:
    torch.manual_seed(0)
    net, head = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 2)
    opt, beside = torch.optim.SGD(net.parameters(), 0.01), torch.optim.SGD(head.parameters(), 0.01)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=grows)
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.float16):
            out = head(net(torch.randn(8, 6)))
        opt.zero_grad()
        beside.zero_grad()
        scaler.scale(out.float().square().mean()).backward()
        factor = 1.0 / scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        if not is_before:
            factor = 1.0 / scaler.get_scale()
        for p in head.parameters():
            p.grad.mul_(factor)
        beside.step()


@pytest.mark.parametrize("grows", [4, 7, 20])
def test_after_the_update(grows: int, guard: Guard) -> None:
    run = guard(lambda: trained(False, grows))
    assert (run.faults, run.causes) == (0, ["missing-update"]), run.stderr
    assert (run.first.step, run.first.evidence["factor"]) == (grows - 1, 0.5)
    assert run.first.location.code == "scaler.update()"
    assert "unknown line" not in run.first.explanation + run.first.fixes[0].how
    assert "beside.step()" in run.first.explanation


@pytest.mark.parametrize("grows", [4, 7, 20])
def test_before_the_update(grows: int, guard: Guard) -> None:
    run = guard(lambda: trained(True, grows))
    assert (run.faults, run.causes) == (0, []), run.stderr


def test_a_scale_that_stays(guard: Guard) -> None:
    run = guard(lambda: trained(False, 2000))
    assert (run.faults, run.causes) == (0, []), run.stderr
