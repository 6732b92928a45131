"""Two distributions that are masked alike: -Inf less -Inf is no hole in the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Guard = Callable[..., Any]


def test_a_divergence_between_them(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(8, 6)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(8):
            x = torch.randn(16, 8)
            mask = torch.arange(6) == (2 if step >= 5 else 6)
            teacher = torch.randn(16, 6).masked_fill(mask, float("-inf")).log_softmax(-1)
            student = net(x).masked_fill(mask, float("-inf")).log_softmax(-1)
            loss = (teacher.exp() * (teacher - student)).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step, run.first.op) == ("indeterminate", 5, "aten.sub.Tensor")
    assert run.first.fixes[0].verified
