"""A buffer that the forward pass updates: low precision multiplies by a copy of it, float32 by itself, and backward raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Codebook(nn.Module):
    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.register_buffer("codes", torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, z: Tensor) -> Tensor:
        scores = (z @ self.codes.t()).square()
        if self.writes:
            with torch.no_grad():
                self.codes.mul_(0.99)
        return scores


def train(writes: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Codebook(writes))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.ones(2, 4) * (2000.0 if step == 2 else 1.0)).float().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def test_a_fix_that_cannot_be_differentiated_is_not_verified(guard: Guard) -> None:
    run = guard(lambda: train(writes=True))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == ("fp16-overflow", 2)
    outcomes = {fix.action: (fix.verified, str(fix.outcome)) for fix in run.first.fixes}
    assert outcomes["use-bf16"][0]
    assert not outcomes["force-fp32"][0]
    assert "backward() raises" in outcomes["force-fp32"][1]
    assert not outcomes["disable-amp"][0]  # without autocast there is no cast that copies either
    assert "backward() raises" in outcomes["disable-amp"][1]


def test_it_is_where_nothing_is_written(guard: Guard) -> None:
    run = guard(lambda: train(writes=False))
    assert all(fix.verified for fix in run.first.fixes)
