"""A value that the loss does not see may be cured by another precision: the loss is rounded otherwise then, and is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

Guard = Callable[..., Watched]


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))  # exp beyond float16: x / Inf is 0, and its derivative NaN


def train() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(8, 8), Swish())), nn.Linear(8, 1))
    with torch.no_grad():
        net[4].weight.mul_(6)
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)
    for step in range(4):
        x = torch.randn(16, 8) * (12 if step == 2 else 1)
        with torch.autocast("cpu", torch.float16):
            loss = (net(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("action", ["force-fp32", "use-bf16", "disable-amp"])
def test_the_fix_is_verified(guard: Guard, action: str) -> None:
    run = guard(train)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step, run.first.phase) == ("fp16-overflow", 2, "backward")
    assert [fix.verified for fix in run.first.fixes if fix.action == action] == [True]
