"""A running statistic that a forward pass turned non-finite: the replay is of that call, not of those before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def test_the_call_that_poisoned_a_buffer_is_replayed_bit_for_bit(guard: Callable[..., Any]) -> None:
    """The step before it, of whose parameters nothing is left, is still in the record."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
        criterion = nn.MSELoss()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(4):
            if step == 2:
                with torch.no_grad():
                    net[3].weight.mul_(2e5)
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(torch.rand(4, 3, 12, 12))
                loss = criterion(out.float(), torch.zeros(4, 8, 8, 8))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            loss.item()

    run = guard(body)
    assert run.first.cause == "fp16-overflow"
    assert (run.first.step, run.first.module, run.first.op) == (2, "3", "aten.convolution.default")
    assert run.first.evidence["rung"] == "replay"
    assert "4.running_mean" in run.first.evidence["poisoned_buffers"]
