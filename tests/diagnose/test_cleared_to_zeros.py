"""Gradients that are set to 0 between the backward pass and the optimizer's step: nothing is learned, and nothing raises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


def train(
    has_scaler: bool, by_module: bool, clears: Callable[[int], bool], puts: bool = False, both: bool = False
) -> None:
    torch.manual_seed(0)
    net, head = nn.Linear(6, 8), nn.Linear(8, 2)
    held = nn.Sequential(net) if both else nn.Sequential(net, nn.ReLU(), head)
    opt = torch.optim.SGD(held.parameters(), 0.1, momentum=0.9)
    beside = torch.optim.SGD(head.parameters(), 0.1) if both else None
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=has_scaler)
    clear = held.zero_grad if by_module else opt.zero_grad
    for it in range(24):
        with torch.autocast("cpu", dtype=torch.float16 if has_scaler else torch.bfloat16):
            out = head(net(torch.randn(8, 6)).relu())
        if not clears(it):
            clear(set_to_none=False)
        scaler.scale(out.float().square().mean()).backward()
        if clears(it):
            clear(set_to_none=False)
        if puts:
            for p in held.parameters():
                p.grad.copy_(torch.randn_like(p))
        scaler.step(opt)
        if beside is not None:
            scaler.step(beside)
            beside.zero_grad()
        scaler.update()


@pytest.mark.parametrize("has_scaler", [True, False])
@pytest.mark.parametrize("by_module", [True, False])
def test_in_every_step(has_scaler: bool, by_module: bool, guard: Guard) -> None:
    run = guard(lambda: train(has_scaler, by_module, lambda it: True))
    assert (run.faults, run.causes) == (0, ["no-gradients"])
    first = run.first
    assert (first.step, first.severity, first.evidence["why"]) == (0, "error", "cleared")
    assert "are 0 when it steps" in first.explanation
    assert "clear(set_to_none=False)" in first.explanation
    assert first.location.code == "scaler.step(opt)"


@pytest.mark.parametrize("clears", [lambda it: it < 6, lambda it: it % 4 == 3, lambda it: False])
def test_in_some_steps(clears: Callable[[int], bool], guard: Guard) -> None:
    run = guard(lambda: train(True, False, clears))
    assert (run.faults, run.causes) == (0, [])


def test_with_others_put_in_their_place(guard: Guard) -> None:
    run = guard(lambda: train(False, False, lambda it: True, puts=True))
    assert (run.faults, run.causes) == (0, [])


def test_a_part_that_is_frozen_so(guard: Guard) -> None:
    run = guard(lambda: train(True, False, lambda it: it < 12, both=True))
    assert (run.faults, run.causes) == (0, [])


@pytest.mark.parametrize("has_scaler", [True, False])
def test_a_copy_is_trained_while_the_optimizer_steps_on_zeros(has_scaler: bool, guard: Guard) -> None:
    """Weight decay and momentum move its weights on, and nothing raises: each has a gradient, which is 0."""

    def script() -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=has_scaler)
        for it in range(30):
            opt.zero_grad(set_to_none=False)
            with torch.autocast("cpu", dtype=torch.float16, enabled=has_scaler):
                out = model(torch.randn(16, 4))
            scaler.scale(out.float().square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            if it == 8:
                best = copy.deepcopy(model)
            if it == 12:
                model = copy.deepcopy(best)

    run = guard(script)
    assert (run.faults, run.causes) == (0, ["stale-parameters"])
    assert (run.first.step, run.first.location.code) == (13, "scaler.step(opt)")
