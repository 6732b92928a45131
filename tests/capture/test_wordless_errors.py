"""Exceptions of the script that cannot say what they are: their `__str__` raises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ampguard
from ampguard.errors import message_of


class WordlessError(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no words")


class Refusing(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.any():
            raise self.error
        return self.layer(x).sum()


def train(model: nn.Module, is_bad: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 2))
        if is_bad and step == 1:
            loss = torch.log(loss.detach() * 0 - 1) * loss
        loss.backward()
        optimizer.step()
    model(torch.zeros(2, 2))


def test_message_of() -> None:
    assert message_of(ValueError("loss is nan")) == "loss is nan"
    assert message_of(WordlessError()) == ""


@pytest.mark.parametrize("is_bad", [False, True], ids=["healthy", "with an incident"])
def test_the_report_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], is_bad: bool) -> None:
    """It ended in "could not finish its report": what had been found was lost."""
    with pytest.raises(WordlessError), ampguard.watch(out=tmp_path / "run") as session:
        train(Refusing(WordlessError()), is_bad)
    assert session.report is not None
    assert [i.cause for i in session.report.incidents] == (["domain-error"] if is_bad else [])
    assert (tmp_path / "run" / "report.json").exists()
    said = capsys.readouterr().err
    assert "fault" not in said
    assert "could not" not in said
