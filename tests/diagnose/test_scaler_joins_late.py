"""A scaler that begins to scale in the middle of a run: is it needed from there on?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
JOINS = 15


class Net(nn.Module):
    """Enters autocast by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 2)
        self.dtype = torch.bfloat16

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            return self.inner(x)  # type: ignore[no-any-return]


def train(half_from: int | None) -> None:
    """Plain steps in bfloat16, then a scaler; from step `half_from` on in float16."""
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = None
    for step in range(48):
        if step == JOINS:
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        if step == half_from:
            model.dtype = torch.float16
        loss = model(torch.randn(16, 8)).float().pow(2).mean()
        opt.zero_grad()
        if scaler is None:
            loss.backward()
            opt.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()


def test_a_scaler_that_joins_where_nothing_is_in_float16(guard: Guard) -> None:
    run = guard(lambda: train(None))

    assert (run.faults, run.causes) == (0, ["needless-scaler"]), run.stderr
    assert (run.first.step, run.first.dtype) == (JOINS, "bfloat16")


@pytest.mark.parametrize("half_from", [JOINS, JOINS + 1, JOINS + 6])
def test_a_scaler_that_joins_because_of_float16(half_from: int, guard: Guard) -> None:
    run = guard(lambda: train(half_from))

    assert (run.faults, run.causes) == (0, []), run.stderr
