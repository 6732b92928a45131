"""A power of integers that leaves the range (`0.9 ** -n` over a long sequence) is bounded by its exponent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

Guard = Callable[..., Watched]


class Retention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(4, 4)
        self.register_buffer("decay", torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        n = torch.arange(x.shape[1])
        grown = self.decay**-n
        return self.values(x) * grown[:, None] * self.decay ** n[:, None]


def train(length: int) -> None:
    torch.manual_seed(0)
    net = Retention()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for step in range(4):
        loss = net(torch.randn(2, length if step == 2 else 16, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_the_exponent_is_clamped(guard: Guard) -> None:
    run = guard(lambda: train(1024))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step, run.first.op) == ("overflow", 2, "aten.pow.Tensor_Tensor")
    exponent = run.first.evidence["max_abs_operand"]
    assert f"its operands reach {exponent:g}" in run.first.explanation
    assert run.first.evidence["result_fp64"] == pytest.approx(0.9**-exponent, rel=0.01)
    clamping = next(fix for fix in run.first.fixes if fix.action == "clamp")
    assert clamping.verified
    assert clamping.how == "grown = self.decay**(-n).clamp(min=-600, max=600)"
