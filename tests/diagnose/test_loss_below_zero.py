"""A likelihood that learns goes below 0: that its size grows is no divergence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Guard = Callable[..., Any]


def test_a_density_that_becomes_narrow(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
        opt = torch.optim.Adam(net.parameters(), lr=0.02)
        for _ in range(80):
            x = torch.randn(64, 5)
            across, along, width = net(x).unbind(-1)
            kappa = nn.functional.softplus(width)
            off = torch.cos(torch.atan2(x[:, 0], x[:, 1]) - torch.atan2(across, along))
            loss = (torch.log(torch.special.i0(kappa)) - kappa * off).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            if not loss.isfinite():
                return

    incident = guard(body).first
    assert (incident.cause, incident.op) == ("overflow", "aten.i0.default")
    assert incident.step > 10
