"""A second optimizer that is stepped past the scaler, before or behind the iteration's update: where its step belongs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


def trained(is_behind: bool) -> None:
    torch.manual_seed(0)
    net, centers = nn.Linear(6, 4), nn.Linear(4, 2)
    opt, beside = torch.optim.Adam(net.parameters(), 1e-3), torch.optim.Adam(centers.parameters(), 1e-3)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = centers(net(torch.randn(8, 6))).float().square().mean()
        opt.zero_grad()
        beside.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        if is_behind:
            scaler.update()
            beside.step()
        else:
            beside.step()
            scaler.update()


@pytest.mark.parametrize("is_behind", [True, False])
def test_where_the_step_belongs(is_behind: bool, guard: Guard) -> None:
    run = guard(lambda: trained(is_behind))
    assert run.causes == ["bypassed-scaler"]
    how = run.first.fixes[0].how
    assert ("before the iteration's update" in how) is is_behind
    assert "(`scaler.update()`)" in how
    assert "; scaler.update()" not in how
    assert "scaler.step(beside)" in how
