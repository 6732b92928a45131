"""Calls of modules that are usual are not looked at in full, and arguments that nobody writes to are not copied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampguard
from ampguard.capture.root_calls import usual


class Counting(nn.Module):
    """Begins to count its calls late: from then on a replay needs the count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0
        self.count = 0

    def forward(self, x: Tensor, counts: bool) -> Tensor:
        if counts:
            self.count = self.count + 1
        return self.layer(x + self.count)


def test_usual_calls_are_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usual, "USUAL_CALLS", 8)
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ampguard.watch(out=tmp_path / "run") as session:
        for step in range(41):
            loss = model(torch.randn(3, 4), step >= 20).pow(2).mean()
            loss = torch.log(loss * 0 - 1) if step == 40 else loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    incident = session.report.incidents[0]
    assert (incident.step, incident.op, incident.evidence["rung"]) == (40, "aten.log.default", "replay")


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift  # keeps nothing of x for backward


def test_arguments_are_copied_again_once_a_script_writes_to_one(tmp_path: Path) -> None:
    model = Shifted()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ampguard.watch(out=tmp_path / "run") as session:
        for step in range(41):
            x = torch.full((3, 4), float("inf") if step == 40 else 1.0)
            out = model(x)
            if step >= 20:
                x.zero_()
            optimizer.zero_grad()
            out.pow(2).mean().backward()
            optimizer.step()
    incident = session.report.incidents[0]
    assert (incident.step, incident.evidence["rung"]) == (40, "replay")
