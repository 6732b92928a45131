"""Healing reaches what the script itself casts to float16: in a module, and in a loss by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Pooled(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if self.dtype == torch.float32:
            return h.square().cumsum(1)[:, -1]
        return h.to(torch.float16).square().cumsum(1)[:, -1]


def train_pool(dtype: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    net = nn.ModuleDict({"pool": Pooled(dtype), "head": nn.Linear(8, 1)})
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    losses = []
    for step in range(8):
        x = torch.randn(6, 5, 4) * (300 if step >= 4 else 1)
        with torch.autocast("cpu", torch.float16, enabled=dtype != torch.float32):
            loss = torch.tanh(net["head"](net["pool"](x).float() / 1e5)).float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_loss(dtype: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    net = nn.Linear(4, 8)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    losses = []
    for step in range(8):
        logits = net(torch.randn(6, 4)) * (1e6 if step >= 4 else 1)
        low = logits.half() if dtype == torch.float16 else logits
        loss = torch.logsumexp(low, -1).float().mean().log1p()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("train", [train_pool, train_loss])
def test_the_run_goes_on_as_in_float32(train: Callable[[torch.dtype], list[float]], overridden: Any) -> None:
    wanted = train(torch.float32)
    with overridden(on_nonfinite="heal") as session:
        losses = train(torch.float16)
    assert losses == pytest.approx(wanted, rel=2e-2)
    (healed,) = session.report.run["healed"]
    assert (healed["step"], healed["action"]) == (4, "force-fp32")
