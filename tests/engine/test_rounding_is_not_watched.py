"""What the engine computes as it stores bfloat16 weights is no operation of the loop's: the guard does not keep it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ampguard
from ampguard.capture.judging.undifferentiated import discarded_loss
from ampguard.capture.record import GlueOp
from ampguard.report.store import read_report


def train(precision: str, steps: int = 8, **options: str) -> None:
    """A model with one output, whose bias is a single number, and an evaluation in each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    amp = ampguard.Amp(model, torch.optim.Adam(model.parameters(), 1e-2), precision, **options)
    for _ in range(steps):
        x = torch.randn(8, 4)
        with amp.autocast():
            loss = (model(x) - x[:, :1]).square().mean()
        amp.backward(loss)
        amp.step()
        model.eval()
        with torch.no_grad(), amp.autocast():
            (model(x) - 1).square().mean()
        model.train()


@pytest.mark.parametrize(
    ("precision", "options"), [("bf16-true", {}), ("bf16-true", {"rounding": "kahan"}), ("O3", {})]
)
def test_the_guard_stays_on(
    precision: str, options: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ampguard.watch(out=tmp_path / "run"):
        train(precision, **options)
    report = read_report(tmp_path / "run" / "report.json")
    assert "a fault of its own" not in capsys.readouterr().err
    assert report.steps == 8
    assert [i.cause for i in report.incidents if i.severity != "info"] == []


def test_a_view_that_autograd_refuses_is_no_loss() -> None:
    weight = nn.Parameter(torch.ones(1))
    with torch.no_grad():
        view = weight.view(-1)
        weight.add_(float("nan"))
    with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
        view.is_leaf  # noqa: B018
    made = GlueOp.__new__(GlueOp)
    made.index, made.outputs = 0, [lambda: view]
    assert discarded_loss([made], True, lambda _: False) is None
