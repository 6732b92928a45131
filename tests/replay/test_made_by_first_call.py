"""What a module's first call makes (a counter, a running number) was not there before it, and is not in its replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Counting(nn.Module):
    """A first call that is a logarithm of 0, and later ones that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = getattr(self, "seen", 0) + 1
        return (self.layer(x).square() * 0 + (self.seen - 1)).log()


def test_first_call_is_replayed_as_it_was(guard: Callable[..., Any]) -> None:
    models = []

    def body() -> None:
        torch.manual_seed(0)
        model = Counting()
        models.append(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(torch.ones(2, 2)).mean()
            optimizer.zero_grad()
            loss.backward()

    run = guard(body)

    assert run.faults == 0, run.stderr
    assert run.causes[0] == "domain-error", run.stderr
    assert models[0].seen == 2, "a replay leaves what it found"
