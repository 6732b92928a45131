"""An optimizer that rests at first and is stepped past the scaler then: the incident names the step in which it begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(self.table(ids)).squeeze(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("joins", [2, 10, 20])
def test_the_step_in_which_it_begins(joins: int, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = Scores()
        of_mlp = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)
        of_table = torch.optim.SGD(model.table.parameters(), lr=1e-6)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(joins + 4):
            ids = torch.randint(20, (32,))
            of_mlp.zero_grad()
            of_table.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.binary_cross_entropy_with_logits(model(ids), (ids > 9).float())
            scaler.scale(loss).backward()
            scaler.step(of_mlp)
            if step >= joins:
                of_table.step()
            scaler.update()

    run = guard(body)

    assert (run.faults, run.causes) == (0, ["bypassed-scaler"]), run.stderr
    assert (run.first.step, run.first.occurrences) == (joins, 4)
