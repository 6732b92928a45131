"""A failure at a line that was healed may be another one: it is told as what it is, and fixes that do not help are undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

HALF, BOTH = 3, 6
"""The step whose exponentials overflow in float16, and the one whose overflow in float32 as well."""
GAINS = {HALF: 20.0, BOTH: 150.0}


def scores_of(output: Tensor, step: int) -> Tensor:
    return output.abs() / output.abs().max() * GAINS.get(step, 1.0)


def test_an_overflow_of_float32_at_a_healed_line_is_told_as_that(overridden: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    types = []
    with overridden(on_nonfinite="heal") as session:
        for step in range(10):
            x = torch.nn.functional.normalize(torch.randn(8, 4), dim=1)
            with torch.autocast("cpu", dtype=torch.float16):
                output = model(x)
                types.append(output.dtype)
                loss = torch.log(torch.exp(scores_of(output, step)).sum(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    report = session.report
    assert [(i.step, i.cause, i.occurrences) for i in report.incidents] == [
        (HALF, "fp16-overflow", 1),
        (BOTH, "overflow", 1),
    ]
    assert {fix.action for fix in report.incidents[1].fixes if fix.verified} == {"stable-form", "clamp"}
    run = report.run
    assert [(fix["step"], fix["action"]) for fix in run["healed"]] == [(HALF, "force-fp32")]
    assert (run["steps_made_again"], run["steps_held_off"]) == ([HALF], 1)
    assert types == [torch.float16] * 10


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Exponential()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return torch.log(self.scale(scores_of(self.linear(x), step)).sum(1)).mean()


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x)


def test_a_fix_that_does_not_help_another_model_is_taken_back(
    overridden: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    with overridden(on_nonfinite="heal") as session:
        for step in range(10):
            if step in (0, 5):
                model = Scorer()
                optimizer = torch.optim.SGD(model.parameters(), 1e-3)
            x = torch.nn.functional.normalize(torch.randn(8, 4), dim=1)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(x, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    run = session.report.run
    assert [(fix["step"], fix["action"]) for fix in run["healed"]] == [(HALF, "force-fp32")]
    assert run["steps_held_off"] == 1
    assert "scale in float32 does not help, and is taken back" in capsys.readouterr().err
