"""An average of the weights that the script keeps by itself goes bad long before it is evaluated: told where it was written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import fingerprint

from ampguard.capture import schedule

Guard = Callable[..., Any]
BAD = 5


def decay(step: int, is_bad: bool) -> Tensor:
    warm = torch.tensor(float(step - BAD if is_bad else step + 1))
    return (1.0 - 1.0 / warm.abs()).clamp(max=0.99)


def train(is_bad: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    batches = list(torch.randn(14, 8, 4))
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(14):
        loss = model(batches[step]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            share = decay(step, is_bad)
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(share).add_(p * (1 - share))
    average.eval()
    with torch.no_grad():
        print(average(torch.ones(2, 4)).square().mean().item())
    return fingerprint(model, optimizer)


def test_the_line_that_made_it_bad(guard: Guard) -> None:
    plain = train()
    run = guard(train)
    assert run.faults == 0, run.stderr
    assert run.result == plain
    (incident,) = run.report.incidents  # its evaluation is a consequence
    assert (incident.cause, incident.mode, incident.phase) == ("division-by-zero", "train", "parameters")
    assert incident.step == BAD + 1, "the iteration ends with the optimizer's step"
    assert incident.location is not None
    assert incident.location.function == "decay"
    assert any(fix.verified for fix in incident.fixes)
    assert all("the loss is" not in (fix.outcome or "") for fix in incident.fixes)


def test_an_average_that_stays_finite(guard: Guard) -> None:
    run = guard(lambda: train(is_bad=False))
    assert run.faults == 0, run.stderr
    assert not run.report.incidents


def test_what_it_may_take_is_bounded(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once nothing more is free, what is written is not taped; the evaluation tells, and who has written it."""
    monkeypatch.setattr(schedule, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(schedule, "GLUE_TIME_SHARE", 0.0)
    run = guard(train)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.mode) == ("nonfinite-parameter", "eval")
    assert "the script itself has written these values" in run.first.explanation
