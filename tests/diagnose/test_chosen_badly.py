"""A code book under float16 autocast: codes that nothing chose lie beyond float16, and are chosen for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Quantizer(nn.Module):
    """Its codes are the averages of what chose them: with an epsilon in the divisor, those of nothing grow (rosinality's)."""

    def __init__(self, by_index: bool) -> None:
        super().__init__()
        self.by_index = by_index
        self.register_buffer("codes", torch.randn(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        far = x.pow(2).sum(1, keepdim=True) - 2 * x @ self.codes + self.codes.pow(2).sum(0, keepdim=True)
        chosen = (-far).argmax(1) if self.by_index else (-far).max(1)[1]
        found = nn.functional.embedding(chosen, self.codes.t())
        return x + (found - x).detach()


@pytest.mark.parametrize("by_index", [True, False])
def test_overflow_of_the_distances(by_index: bool, guard: Guard) -> None:
    def script() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Quantizer(by_index), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(4):
            if step == 2:
                model[1].codes[:, 3:6] /= 1e-5
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(32, 4)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(script)
    assert run.faults == 0, run.stderr
    first = run.first
    assert (first.cause, first.step, first.module) == ("fp16-overflow", 2, "1")
    assert first.location.code.startswith("far = x.pow(2)")
    assert f"{'argmax' if by_index else 'max'} at test_chosen_badly.py:" in first.explanation
    assert (first.fixes[0].action, first.fixes[0].target, first.fixes[0].verified) == ("force-fp32", "1", True)
