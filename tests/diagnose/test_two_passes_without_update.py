"""Gradients that are unscaled for a first step (SAM's), and those of a second pass that the scaler takes as unscaled already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


def train(updates_between: bool) -> None:
    torch.manual_seed(0)
    net = nn.Linear(6, 2)
    opt = torch.optim.SGD(net.parameters(), 0.01)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(6):
        x = torch.randn(8, 6)
        for is_second in (False, True):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(x)
            scaler.scale(out.float().square().mean()).backward()
            if not is_second:
                scaler.unscale_(opt)  # first
                if updates_between:
                    scaler.update()
        scaler.step(opt)
        scaler.update()


@pytest.mark.parametrize("updates_between", [True, False])
def test_where_the_update_belongs(updates_between: bool, guard: Guard) -> None:
    run = guard(lambda: train(updates_between))
    assert (run.faults, run.causes) == (0, [] if updates_between else ["missing-update"])
    if not updates_between:
        how = run.first.fixes[0].how
        assert "# first`) have been used or dropped, before the next backward pass" in how
        assert "between the two passes of SAM" in how
