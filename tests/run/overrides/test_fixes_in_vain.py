"""A failure at a line that was healed may be another one: larger fixes that do not help are taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

HALF, BOTH = 3, 6
"""The step whose exponentials overflow in float16, and the one whose overflow in float32 as well."""


def test_a_larger_fix_that_does_not_help_is_taken_back(
    overridden: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    types = []
    with overridden(on_nonfinite="heal") as session:
        for step in range(10):
            gain = {HALF: 20.0, BOTH: 150.0}.get(step, 1.0)
            x = torch.nn.functional.normalize(torch.randn(8, 4), dim=1)
            with torch.autocast("cpu", dtype=torch.float16):
                output = model(x)
                types.append(output.dtype)
                scores = output.abs() / output.abs().max() * gain
                loss = torch.log(torch.exp(scores).sum(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    run = session.report.run
    assert [(fix["step"], fix["action"]) for fix in run["healed"]] == [(HALF, "force-fp32")]
    assert run["steps_made_again"] == [HALF]
    assert run["steps_held_off"] == 1
    assert types == [torch.float16] * 10
    assert "autocast off does not help, and is taken back" in capsys.readouterr().err
