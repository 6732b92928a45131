"""A scale that is set between the micro-batches of a window is no end of an iteration, whatever was cleared before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from watching import Watched, seed_everything

Guard = Callable[..., Watched]


def train(sets_at: int, clears_first: bool) -> None:
    """Windows of 4; before micro-batch `sets_at` the scale is halved."""
    seed_everything()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for micro in range(48):
        if micro == sets_at:
            scaler.update(512.0)
        if clears_first and micro % 4 == 0:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(8, 4)).float().pow(2).mean() / 4
        scaler.scale(loss).backward()
        if micro % 4 == 3:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if not clears_first:
                optimizer.zero_grad()


@pytest.mark.parametrize("clears_first", [False, True])
def test_it_breaks_the_window(clears_first: bool, guard: Guard) -> None:
    incident = guard(lambda: train(30, clears_first)).first
    assert (incident.cause, incident.step) == ("accumulation-broken", 7)
    assert incident.location is not None
    assert incident.location.code == "scaler.update(512.0)"


@pytest.mark.parametrize("clears_first", [False, True])
def test_between_two_windows_it_is_fine(clears_first: bool, guard: Guard) -> None:
    assert guard(lambda: train(32, clears_first)).report.incidents == ()
