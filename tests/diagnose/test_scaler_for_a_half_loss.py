"""A scaler without autocast is needed where the loss itself is computed in float16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class HalfLoss(nn.Module):
    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return (out.half() - y.half()).pow(2).mean()


@pytest.mark.parametrize(("criterion", "causes"), [(HalfLoss(), []), (nn.MSELoss(), ["needless-scaler"])])
def test_a_loss_in_half(criterion: nn.Module, causes: list[str], guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        opt = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(40):
            loss = criterion(net(torch.randn(8, 4)), torch.zeros(8, 2))
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    assert guard(body).causes == causes
