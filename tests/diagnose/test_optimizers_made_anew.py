"""A script that makes its optimizer anew for each cycle: what a later one trains was not forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.late = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 2)


@pytest.mark.parametrize("joins", [False, True])
def test_a_layer_that_joins_in_a_later_cycle(joins: bool, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = Net()
        for cycle in range(3):
            opt = torch.optim.SGD(net.parameters(), lr=0.01)
            for _ in range(10):
                opt.zero_grad()
                z = net.body(torch.randn(16, 4)).relu()
                loss = net.head(z).square().mean()
                if joins and cycle == 2:
                    loss = loss + net.late(z).square().mean()
                loss.backward()
                opt.step()

    run = guard(body)

    assert run.faults == 0, run.stderr
    assert [(i.cause, i.module) for i in run.report.incidents] == ([] if joins else [("unused-parameters", "late")])
