"""A learning-rate range test ends in numbers that are not finite; what goes on with those weights is a failure."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


def trained(precision: str, restores: bool, high: float = 1e6, stops: bool = True) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    dtype = getattr(torch, precision)
    losses = []

    def step(rate: float) -> float:
        optimizer.param_groups[0]["lr"] = rate
        with torch.autocast(
            "cpu", dtype=torch.bfloat16 if dtype is torch.float32 else dtype, enabled=dtype is not torch.float32
        ):
            out = model(torch.randn(16, 8))
        loss = nn.functional.mse_loss(out.float(), torch.randn(16, 1))
        if stops and not math.isfinite(loss.item()):
            return loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for n in range(100):
        losses.append(step(1e-5 * (high / 1e-5) ** (n / 99)))
        if not math.isfinite(losses[-1]):
            break
    if restores:
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
    losses += [step(1e-3) for _ in range(20)]
    return losses


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_its_end_is_a_note(guard: Guard, precision: str) -> None:
    run = guard(lambda: trained(precision, restores=True))
    assert run.faults == 0, run.stderr
    assert not all(map(math.isfinite, run.result))
    assert math.isfinite(run.result[-1])
    assert {incident.severity for incident in run.report.incidents} == {"info"}, run.stderr
    assert any("range test" in incident.explanation for incident in run.report.incidents)


@pytest.mark.parametrize("stops", [True, False])
def test_weights_that_nobody_restores_are_a_failure(guard: Guard, stops: bool) -> None:
    run = guard(lambda: trained("float32", restores=False, stops=stops))
    assert run.faults == 0, run.stderr
    assert run.report.incidents[0].severity == "error", run.stderr
