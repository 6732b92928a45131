"""What a framework's callback asks of a running guard: the report so far, and why this step fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ampguard.report.store import read_report
from ampguard.run.session import RunOptions, Session


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (net(x) * 300).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def test_the_report_so_far_and_the_latest_error(tmp_path: Path) -> None:
    net = nn.Linear(4, 4)
    nn.init.ones_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), 1e-9)
    session = Session(RunOptions(out=tmp_path / "run"))
    session.start()
    try:
        assert session.report_path is None
        step(net, optimizer, torch.full((2, 4), 0.01))
        assert session.report_now() == tmp_path / "run" / "report.json"
        assert (read_report(tmp_path / "run").status, read_report(tmp_path / "run").steps) == ("clean", 1)
        assert session.explain_now(FloatingPointError("nothing of ours")) is None
        step(net, optimizer, torch.full((2, 4), 10.0))
        incident = session.explain_now(FloatingPointError("the loss is inf"))
        assert incident is not None
        assert (incident.cause, incident.step) == ("fp16-overflow", 1)
        session.report_now()
        assert read_report(tmp_path / "run").incidents == (incident,)
        step(net, optimizer, torch.full((2, 4), 0.01))  # the guard goes on
    finally:
        session.finish()
    assert session.report is not None
    assert session.report.steps == 3


def test_a_folder_that_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(RunOptions(out=tmp_path / "run"))
    session.start()
    try:
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").touch()
        assert session.report_now() is None
    finally:
        session.finish()
    assert "run" in capsys.readouterr().err
