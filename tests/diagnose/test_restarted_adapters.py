"""Parameters that are made anew in the middle of a run: the optimizer keeps stepping with what their forerunners have left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.base.weight.requires_grad_(False)
        self.begin()

    def begin(self) -> None:
        self.down = nn.Parameter(torch.randn(2, 8) * 0.1)
        self.up = nn.Parameter(torch.zeros(8, 2))

    @torch.no_grad()
    def merge(self) -> None:
        self.base.weight += self.up @ self.down
        self.begin()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def test_the_model_clears_its_gradients_and_not_those_that_it_had(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(LowRank(), nn.Tanh(), nn.Linear(8, 4))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for step in range(40):
            if step == 12:
                model[0].merge()
            model.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == ["stale-parameters"]
    assert (run.first.step, run.first.severity) == (12, "error")
    assert run.first.evidence["lost_count"] == 2
    assert run.first.fixes[0].action == "rebuild-optimizer"


def test_an_optimizer_of_the_whole_model_is_not_cleared_at_all(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(LowRank(), nn.Tanh(), nn.Linear(8, 4))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for step in range(40):
            if step < 12:
                optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()

    run = guard(body)
    assert run.causes == ["missing-zero-grad"]
