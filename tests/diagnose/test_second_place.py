"""A step that fails in two places: no fix of the first is enough, and both together are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Pooled(nn.Module):
    """The mean of a set, made a unit vector: an empty set is 0/0, and then a vector of length 0."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 6)

    def forward(self, members: Tensor, is_there: Tensor) -> Tensor:
        count = is_there.sum(1, keepdim=True)
        mean = (self.lift(members) * is_there[..., None]).sum(1) / count
        length = mean.square().sum(1, keepdim=True).sqrt()
        return mean / length


def body() -> None:
    torch.manual_seed(0)
    net = Pooled()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        is_there = torch.ones(5, 3)
        if step == 2:
            is_there[1] = 0
        loss = net(torch.randn(5, 3, 4), is_there).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_the_fix_changes_both_lines(guard: Guard) -> None:
    run = guard(body)
    assert run.faults == 0, run.stderr
    incident = run.first
    assert (incident.cause, incident.step) == ("division-by-zero", 2)
    assert incident.location.code.endswith("/ count")
    fix = incident.fixes[0]
    assert fix.verified, fix
    first, second = fix.how.split("\n")[:2]
    assert "mean = (self.lift" in first
    assert "length" in second
    assert first not in [other.how for other in incident.fixes[1:]]
    assert "its gradients too" in fix.outcome
