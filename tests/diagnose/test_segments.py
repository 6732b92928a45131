"""Segments without elements: a graph of which no node was sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Pooled(nn.Module):
    def __init__(self, reduce: str, by_offsets: bool) -> None:
        super().__init__()
        self.node = nn.Linear(3, 4)
        self._reduce, self._by_offsets = reduce, by_offsets

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.node(x)
        if self._by_offsets:
            ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            return torch.segment_reduce(h, self._reduce, offsets=ends, axis=0)
        return torch.segment_reduce(h, self._reduce, lengths=lengths)


@pytest.mark.parametrize(("reduce", "by_offsets"), [("mean", False), ("mean", True), ("max", False)])
def test_a_segment_without_elements(guard: Guard, reduce: str, by_offsets: bool) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = Pooled(reduce, by_offsets)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            lengths = torch.tensor([2, 3, 0 if step == 2 else 1, 1])
            loss = model(torch.randn(int(lengths.sum()), 3), lengths).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step, first.evidence["segment"]) == ("empty-reduction", 2, 2)
    fix = first.fixes[0]
    assert (fix.action, fix.verified) == ("guard-empty", True)
    if reduce == "mean":
        assert fix.how.endswith("initial=0)")
