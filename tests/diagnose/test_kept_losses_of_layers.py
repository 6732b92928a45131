"""Several layers leave a part of the loss in an attribute; all of them are NaN, and each is still known for its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import seed_everything

Guard = Callable[..., Any]


class Router(nn.Module):
    """Routes over what a mask leaves, and keeps how evenly it did."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(6, 3), nn.Linear(6, 6)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor, dropped: Tensor) -> Tensor:
        share = self.gate(x).masked_fill(dropped, float("-inf")).softmax(-1)
        self.balance = 3 * share.mean(0).square().sum()
        return x + self.value(x) * share.sum(-1, keepdim=True)


@pytest.mark.parametrize("is_read_at_once", [True, False])
def test_fix_is_verified(is_read_at_once: bool, guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        layers = nn.ModuleList([Router(), Router(), Router()])
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
        for step in range(4):
            h, y = torch.randn(8, 6), torch.arange(8) % 6
            dropped = torch.zeros(8, 3, dtype=torch.bool)
            dropped[2] = step == 3
            kept: Any = 0
            for layer in layers:
                h = layer(h, dropped)
                kept = kept + layer.balance if is_read_at_once else 0
            kept = kept if is_read_at_once else sum(layer.balance for layer in layers)
            loss = nn.functional.cross_entropy(h, y) + 0.1 * kept
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step, first.module) == ("masked-softmax", 3, "0")
    assert [fix.verified for fix in first.fixes] == [True, True]
