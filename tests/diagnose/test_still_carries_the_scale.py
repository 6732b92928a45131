"""An optimizer's own step on gradients that a script has multiplied by another number than the loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]
STARTS = 5


def train(weight_of_centre: float, divides: bool) -> None:
    """The centre loss of re-identification: its weight is taken out of the gradients of its centres again."""
    torch.manual_seed(0)
    model, centres = nn.Linear(6, 4), nn.Linear(4, 3, bias=False)
    opt, opt_centre = torch.optim.Adam(model.parameters(), 1e-3), torch.optim.SGD(centres.parameters(), 1e-6)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for it in range(8):
        opt.zero_grad()
        opt_centre.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.randn(8, 6))
        loss = out.float().square().mean()
        if it >= STARTS:
            loss = loss + weight_of_centre * centres(out.float()).square().mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        if it >= STARTS:
            scale = scaler.get_scale() if divides else 1.0
            for p in centres.parameters():
                p.grad.mul_(1.0 / (scale * weight_of_centre))
            opt_centre.step()
        scaler.update()


@pytest.mark.parametrize("weight", [5e-4, 0.5, 3.0])
def test_it_still_carries_the_scale(weight: float, guard: Guard) -> None:
    run = guard(lambda: train(weight, divides=False))
    first = run.first
    assert (run.faults, run.causes, first.step) == (0, ["bypassed-scaler"], STARTS), run.stderr
    assert first.location.code == "opt_centre.step()"
    assert first.evidence["factor"] == 2.0**14


@pytest.mark.parametrize("weight", [5e-4, 0.5, 3.0])
def test_divided_in_one_go(weight: float, guard: Guard) -> None:
    run = guard(lambda: train(weight, divides=True))
    assert (run.faults, run.causes) == (0, []), run.stderr
