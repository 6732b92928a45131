"""A loop that steps in every iteration and clears its gradients in some of them only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


def _loop(is_cleared: Callable[[int], bool], steps: int) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(6, 1)
        opt = torch.optim.SGD(net.parameters(), lr=0.01)
        for it in range(steps):
            if is_cleared(it):
                opt.zero_grad()
            loss = (net(torch.randn(16, 6)) - 1).pow(2).mean()
            loss.backward()
            opt.step()

    return body


@pytest.mark.parametrize("every", [2, 3, 10])
def test_cleared_in_every_so_many(every: int, guard: Guard) -> None:
    (incident,) = guard(_loop(lambda it: it % every == 0, 40)).report.incidents
    assert (incident.cause, incident.location.code) == ("missing-zero-grad", "opt.step()")
    assert incident.step == (1 if every < 4 else incident.step)
    assert incident.evidence["last_step"] > 30


def test_cleared_in_nearly_all(guard: Guard) -> None:
    """The last gradients of an epoch, left to the next one."""
    assert not guard(_loop(lambda it: it % 8 != 5, 160)).report.incidents
