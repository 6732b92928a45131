"""`scaler.update()` that PyTorch refuses: behind the step of an iteration, or in the middle of the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


@pytest.mark.parametrize(("calls", "step"), [("bsubu", 1), ("bsubsubbu", 2), ("bsuu", 0), ("bsubsuu", 1)])
def test_the_step_of_an_update_without_a_step(calls: str, step: int, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net, scaler = nn.Linear(4, 2), torch.amp.GradScaler("cpu", init_scale=64.0)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for call in calls:
            if call == "b":
                scaler.scale(net(torch.ones(3, 4)).square().mean()).backward()
            elif call == "s":
                scaler.step(opt)
                opt.zero_grad()
            else:
                scaler.update()

    def refused() -> None:
        with pytest.raises(AssertionError, match="prior to update"):
            body()

    incident = guard(refused).report.incidents[0]
    assert (incident.cause, incident.step) == ("missing-update", step)
