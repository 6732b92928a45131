"""A precision that came from outside is mended from outside: the fixes are options, and they cure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn


class Power(nn.Module):
    """Squares of what the first layer makes: beyond float16 from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.energy = nn.Sequential(nn.Linear(8, 8), nn.Softplus())
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.log1p(self.energy(self.encoder(x))))


def train(own_region: bool = False) -> None:
    torch.manual_seed(0)
    net = Power()
    optimizer = torch.optim.SGD(net.parameters(), 1e-6)
    for step in range(4):
        x = torch.randn(8, 4) * (3e5 if step == 2 else 1.0)
        with torch.autocast("cpu", torch.bfloat16, enabled=own_region):
            loss = net(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_fixes_are_options_that_cure(overridden: Callable[..., Any], tmp_path: Path) -> None:
    with overridden("fp16") as session:
        train()
    first = session.report.incidents[0]
    assert (first.cause, first.step) == ("fp16-overflow", 2)
    fixes = {fix.action: fix for fix in first.fixes}
    assert all(fixes[action].verified for action in ("force-fp32", "use-bf16", "disable-amp"))
    forced = fixes["force-fp32"]
    options = forced.how.splitlines()[0].removeprefix("beside --precision fp16: ").split()
    assert options == [word for target in forced.target.split(", ") for word in ("--force-fp32", target)]
    assert "torch.autocast(" in forced.how, "the code too"
    assert fixes["use-bf16"].how.endswith("--precision bf16 in place of fp16")
    assert fixes["disable-amp"].how.endswith("--precision fp32 in place of fp16")
    (tmp_path / "run").rename(tmp_path / "first")
    with overridden("fp16", tuple(options[1::2])) as session:
        train()
    assert session.report.status == "clean"


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_a_region_of_the_scripts_own_is_left_in_its_code(precision: str | None, overridden: Callable[..., Any]) -> None:
    with overridden(precision, ("encoder",) if precision is None else ()) as session:
        train(own_region=True)
    for fix in (fix for incident in session.report.incidents for fix in incident.fixes if fix.action == "force-fp32"):
        assert "--force-fp32" not in fix.how


def test_a_gained_loss_scale_has_no_scaler_to_begin_lower(overridden: Callable[..., Any], tmp_path: Path) -> None:
    def train_strictly() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            loss = net(torch.randn(8, 4)).float().square().sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()

    with pytest.raises(RuntimeError, match="non-finite"), overridden("fp16") as session:
        train_strictly()
    (first,) = session.report.incidents
    lower = next(fix for fix in first.fixes if fix.action == "lower-loss-scale")
    assert first.cause == "loss-scale-overflow"
    assert lower.verified
    assert lower.how.startswith("beside --precision fp16: --on-nonfinite heal")
    (tmp_path / "run").rename(tmp_path / "first")
    with overridden("fp16", on_nonfinite="heal") as session:
        train_strictly()
    assert session.report.run["steps_held_off"] == 0
