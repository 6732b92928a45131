"""Gradients that a script hands to its masters, and that are 0 where the loss is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Guard = Callable[..., Any]


def test_a_loss_of_zero_leaves_no_stale_parameters(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        master = nn.Linear(8, 4)
        half = copy.deepcopy(master).half()
        optimizer = torch.optim.Adam(master.parameters(), lr=1e-3)
        for step in range(1, 41):
            weight = 0.0 if step in (16, 17, 32) else 1.0  # (looks at all parameters fall on these)
            loss = weight * half(torch.randn(16, 8).half()).float().square().mean()
            half.zero_grad()
            (loss * 128.0).backward()
            for low, high in zip(half.parameters(), master.parameters(), strict=True):
                assert low.grad is not None
                high.grad = low.grad.float() / 128.0
            optimizer.step()
            with torch.no_grad():
                for low, high in zip(half.parameters(), master.parameters(), strict=True):
                    low.copy_(high)

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert not run.report.incidents, run.stderr
