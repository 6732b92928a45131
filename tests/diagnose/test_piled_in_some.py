"""Gradients that a script clears itself, of a list of parameters that has gone out of date."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ampguard


class Trainer:
    """Counts its steps under the name that an optimizer's wrapper has for another thing."""

    def __init__(self) -> None:
        self.step = 0
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model[2].parameters(), lr=0.01)
        self.cleared = [p for p in self.model.parameters() if p.requires_grad]

    def clear(self) -> None:
        for p in self.cleared:
            p.grad = None

    def fit(self, clear: Callable[[], None]) -> None:
        for self.step in range(14):
            if self.step == 6:
                self.model[0].requires_grad_(True)
                self.optimizer.add_param_group({"params": list(self.model[0].parameters())})
            clear()
            self.model(torch.randn(8, 4)).square().mean().backward()
            self.optimizer.step()


@pytest.mark.parametrize("is_right", [False, True])
def test_which_pile_up(is_right: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with ampguard.watch(out=tmp_path / "run") as session:
        trainer = Trainer()
        trainer.fit(trainer.optimizer.zero_grad if is_right else trainer.clear)
    assert session.report is not None
    found = session.report.incidents
    assert [(i.cause, i.step, i.module) for i in found] == ([] if is_right else [("missing-zero-grad", 7, "0")])
    for incident in found:
        assert "2 of 4 parameters of `self.optimizer` (`0`)" in incident.explanation
        assert "self.optimizer.zero_grad()" in (incident.fixes[0].how or "")
