"""`--on-nonfinite` around a loop whose own engine leaves bad steps out: the step behind them is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ampguard

BAD = 3


def trained(precision: str, accumulate: int) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    amp = ampguard.Amp(model, optimizer, precision, accumulate=accumulate, init_scale=256.0)
    for window in range(8):
        batches = torch.randn(accumulate, 6, 8)
        for number in range(accumulate):
            x = batches[number] * (float("nan") if window == BAD and number == accumulate - 1 else 1.0)
            with amp.autocast():
                loss = model(x).pow(2).mean()
            amp.backward(loss)
            amp.step()
    return [p.detach().clone() for p in model.parameters()], amp.steps


@pytest.mark.parametrize("how", ["skip", "heal"])
@pytest.mark.parametrize(("precision", "accumulate"), [("fp32", 1), ("bf16", 2), ("fp16", 1), ("fp16", 2), ("O2", 1)])
def test_only_the_bad_step_is_left_out(
    overridden: Callable[..., Any], precision: str, accumulate: int, how: str
) -> None:
    expected, _ = trained(precision, accumulate)
    with overridden(on_nonfinite=how) as session:
        got, made = trained(precision, accumulate)
    assert made == 7
    assert all(map(torch.equal, got, expected))
    assert session.report.run["steps_held_off"] <= 1


def test_scaler_whose_loop_drops_gradients_itself(overridden: Callable[..., Any]) -> None:
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    moved = []
    with overridden(on_nonfinite="skip") as session:
        for step in range(6):
            x = torch.randn(6, 8) * (float("nan") if step == BAD else 1.0)
            with torch.autocast("cpu", torch.float16):
                loss = model(x).pow(2).mean()
            scaler.scale(loss).backward()
            before = model.weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            moved.append(not torch.equal(before, model.weight))
            for p in model.parameters():
                p.grad = None
    assert moved == [step != BAD for step in range(6)]
    assert session.report.run["steps_held_off"] == 1
