"""A line that overflows in one of its operators now, and in another later: one failure, with one fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bands = nn.Parameter(torch.rand(16, 4))

    def forward(self, wave: Tensor) -> Tensor:
        return (wave * wave) @ self.bands


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = Energy()
        self.head = nn.Linear(4, 2)

    def forward(self, wave: Tensor) -> Tensor:
        return self.head((1.0 + self.energy(wave)).log())


def test_it_is_one_incident(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(8):
            loud = {2: 200.0, 5: 300.0}.get(step, 1.0)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net((loud * torch.ones(4, 16)).half()).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    run = guard(body)
    assert run.faults == 0, run.stderr
    (incident,) = [i for i in run.report.incidents if i.severity == "error"]
    assert (incident.cause, incident.step, incident.op, incident.occurrences) == (
        "fp16-overflow",
        2,
        "aten.mm.default",
        2,
    )
