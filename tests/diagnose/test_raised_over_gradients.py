"""A script that raises an error at gradients which are not finite, where PyTorch's scaler would have skipped the step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import ampguard
from ampguard.capture.raised import is_about_numbers
from ampguard.incident import Report

Check = Callable[[nn.Module, Any, torch.optim.Optimizer], object]


def clips(model: nn.Module, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def asserts(model: nn.Module, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def fails_otherwise(model: nn.Module, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    raise KeyError("a metric that nobody has logged")


def body(check: Check, bad_step: int) -> Callable[[], None]:
    def script() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(6):
            x = torch.randn(16, 6)
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x)
            loss = F.mse_loss(out.float(), torch.full((16, 1), 3e4 if step in (1, bad_step) else 1.0))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if step == bad_step:
                check(model, scaler, optimizer)
            scaler.step(optimizer)
            scaler.update()

    return script


def ended_by(script: Callable[[], None], out: Path) -> Report:
    with contextlib.suppress(RuntimeError, AssertionError, KeyError), ampguard.watch(out=out) as session:
        script()
    assert session.report is not None
    return session.report


@pytest.mark.parametrize("bad_step", [0, 4])
@pytest.mark.parametrize("check", [clips, asserts])
def test_it_is_what_ended_the_run(check: Check, bad_step: int, tmp_path: Path) -> None:
    report = ended_by(body(check, bad_step), tmp_path)
    (incident,) = [i for i in report.incidents if i.severity != "info"]
    assert (incident.cause, incident.severity, incident.step) == ("loss-scale-overflow", "error", bad_step)
    assert "raises an error" in incident.explanation


def test_another_error_makes_no_failure_of_it(tmp_path: Path) -> None:
    assert ended_by(body(fails_otherwise, 0), tmp_path).status == "clean"


def test_which_errors_speak_of_numbers() -> None:
    assert is_about_numbers(RuntimeError("The total norm of order 2.0 is non-finite"))
    assert is_about_numbers(FloatingPointError("gradient norm is nan"))
    assert not is_about_numbers(KeyError("information"))
    assert not is_about_numbers(KeyboardInterrupt("nan"))
