"""What a script keeps over the steps and writes to is no batch: no sample of it can be left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ampguard.capture.judging.leaving_lines import LARGEST

Guard = Callable[..., Any]


def train(steps: int, dtype: torch.dtype, growth: float) -> None:
    """More is kept than is looked at in each step."""
    torch.manual_seed(0)
    memory = {"sums": torch.ones(8, LARGEST // 8 + 1, dtype=dtype)}
    weights = torch.randn(8, 8).requires_grad_()
    optimizer = torch.optim.SGD([weights], lr=1e-3)
    for step in range(steps):
        x = torch.randn(8, 8)
        recalled = (x @ weights) @ (memory["sums"][:, :8].float() / (step + 1))
        loss = nn.functional.layer_norm(recalled, (8,)).square().mean()
        with torch.no_grad():
            memory["sums"][:, 3] *= growth  # this step has read it already
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(("dtype", "growth"), [(torch.float16, 2.0), (torch.float32, 1e3)])
def test_where_it_is_written_to_is_what_counts(dtype: torch.dtype, growth: float, guard: Guard) -> None:
    run = guard(lambda: train(24, dtype, growth))
    assert run.faults == 0
    incident = run.first
    assert incident.evidence["times_written"] >= 8
    assert "the script keeps it over the steps, and has written to it" in incident.explanation
    assert ("keep it in float32" in incident.explanation) is (dtype == torch.float16)
    assert "filter-sample" not in {fix.action for fix in incident.fixes}


def test_a_batch_that_is_written_to_once_is_a_batch(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(12):
            x = torch.randn(8, 4)
            if step == 10:
                x[3] = torch.nan
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    incident = guard(body).first
    assert "filter-sample" in {fix.action for fix in incident.fixes}
    assert "times_written" not in incident.evidence
