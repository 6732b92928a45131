"""Layers that are unfrozen in the middle of a run, with an optimizer that was built without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]
UNFROZEN_AT, STEPS = 13, 30


def train(frozen: bool, scaled: bool, then: Callable[[nn.Module, torch.optim.Optimizer], None]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    if frozen:
        net[0].requires_grad_(False)
    opt = torch.optim.SGD(net[2].parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    for it in range(STEPS):
        if it == UNFROZEN_AT:
            for p in net.parameters():
                p.requires_grad = True
        if it >= UNFROZEN_AT:
            then(net, opt)
        with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
            loss = net(torch.randn(16, 6)).float().pow(2).mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()


@pytest.mark.parametrize("scaled", [False, True])
def test_nobody_updates_them(scaled: bool, guard: Guard) -> None:
    (incident,) = guard(lambda: train(True, scaled, lambda net, opt: None)).report.incidents
    assert (incident.cause, incident.severity, incident.module) == ("stale-parameters", "warning", "0")
    assert incident.step == UNFROZEN_AT
    assert "`0.weight`, `0.bias` were frozen" in incident.explanation
    assert "add_param_group" in incident.fixes[0].how


def cleared_with_the_model(net: nn.Module, opt: torch.optim.Optimizer) -> None:
    net.zero_grad()


def clipped(net: nn.Module, opt: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)


@pytest.mark.parametrize("then", [cleared_with_the_model, clipped])
def test_since_when_is_told(then: Any, guard: Guard) -> None:
    (incident,) = guard(lambda: train(True, False, then)).report.incidents
    assert (incident.cause, incident.step) == ("stale-parameters", UNFROZEN_AT)


def by_hand(net: nn.Module, opt: torch.optim.Optimizer) -> None:
    for p in net[0].parameters():
        if p.grad is not None:
            p.data.sub_(p.grad, alpha=0.01)
            p.grad = None


def joined(net: nn.Module, opt: torch.optim.Optimizer) -> None:
    if len(opt.param_groups) == 1:
        opt.add_param_group({"params": list(net[0].parameters())})


def frozen_again(net: nn.Module, opt: torch.optim.Optimizer) -> None:
    net[0].requires_grad_(net[0].weight.grad is None)


@pytest.mark.parametrize(("frozen", "then"), [(True, by_hand), (True, joined), (True, frozen_again), (False, joined)])
def test_they_are_updated_otherwise_or_were_never_frozen(frozen: bool, then: Any, guard: Guard) -> None:
    assert not guard(lambda: train(frozen, False, then)).report.incidents


def test_layers_that_are_left_out_without_being_frozen(guard: Guard) -> None:
    assert not guard(lambda: train(False, False, lambda net, opt: None)).report.incidents
