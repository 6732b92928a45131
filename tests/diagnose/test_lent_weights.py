"""Weights that a script lends a model for an evaluation: what makes them bad is no optimizer's doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.capture.glue import schedule

Guard = Callable[..., Any]


class Average:
    """A zero-initialised average that begins late, and is corrected for that."""

    def __init__(self, model: nn.Module, begins: int) -> None:
        self.values = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        self.updates, self.steps, self.begins = 0, 0, begins

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.steps += 1
        if self.steps > self.begins:
            self.updates += 1
            for name, p in model.named_parameters():
                self.values[name].lerp_(p, 0.1)

    @torch.no_grad()
    def lend(self, model: nn.Module) -> dict[str, Tensor]:
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.copy_(self.values[name] / (1.0 - 0.9**self.updates))
        return own


def train(lends_first: bool, begins: int = 60) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = Average(model, begins)
    for step in range(80):
        model.train()
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        average.update(model)
        if step % 40 == 39:
            own = average.lend(model) if lends_first else {}
            model.eval()
            own = own or average.lend(model)
            with torch.no_grad():
                print(model(torch.randn(16, 8)).square().mean().item())
            model.load_state_dict(own)


@pytest.fixture(autouse=True)
def nothing_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(schedule, "GLUE_TIME_SHARE", 0.0)


def test_behind_eval_the_line_is_told(guard: Guard) -> None:
    run = guard(lambda: train(lends_first=False))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.mode, run.first.step) == ("division-by-zero", "eval", 40)
    assert run.first.location.code == "p.copy_(self.values[name] / (1.0 - 0.9**self.updates))"


def test_before_it_the_script_is_named(guard: Guard) -> None:
    run = guard(lambda: train(lends_first=True))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.mode) in [("nonfinite-parameter", "eval"), ("division-by-zero", "eval")]
    assert "optimizer's own arithmetic" not in run.first.explanation


@pytest.mark.parametrize("lends_first", [False, True])
def test_good_ones_are_nobodys_business(lends_first: bool, guard: Guard) -> None:
    run = guard(lambda: train(lends_first, begins=0))
    assert run.faults == 0, run.stderr
    assert not run.report.incidents
