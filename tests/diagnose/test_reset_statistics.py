"""Running statistics that a bad batch has poisoned in every layer: the trial resets all of them, as their layers do."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from watching import Watched, seed_everything

LAYERS, BAD = 4, 3


def test_all_poisoned_statistics_are_reset(guard: Callable[..., Watched]) -> None:
    """With variances of 0 in place of 1, each layer would multiply by 316: beyond float16 after two of them."""
    seed_everything()
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(LAYERS)]
    model = nn.Sequential(*blocks, nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")

    def body() -> None:
        for step in range(6):
            x = torch.randn(8, 6)
            if step == BAD:
                x[2] = math.nan
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            model(torch.randn(8, 6))

    run = guard(body)
    first = run.first
    shown = next(incident for incident in run.report.incidents if incident.mode == "eval")
    assert (first.step, first.cause) == (BAD, "nonfinite-input")
    assert (shown.cause, shown.evidence["others"]) == ("nonfinite-parameter", 2 * LAYERS - 1)
    reset = next(fix for fix in shown.fixes if fix.action == "initialise-parameter")
    assert f"and the {2 * LAYERS - 1} more after that step" in reset.how
    assert reset.verified
