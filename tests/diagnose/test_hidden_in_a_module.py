"""A value that the loss never sees: line and module are those of the value, not of what differentiates it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class RMS(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8)


def test_padding_whose_epsilon_is_flushed(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8, bias=False), RMS(), nn.Linear(8, 3))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, -100, 1])
        x[3] = 0
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

    incident = guard(body).first
    assert (incident.cause, incident.phase, incident.module) == ("fp16-underflow", "backward", "1")
    assert "rsqrt" in incident.location.code
