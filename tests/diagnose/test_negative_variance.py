"""A checkpoint with a negative running variance: training does not read it, evaluation takes its root."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


def run_with(variance: float, affine: bool = True, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=affine), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)
    )
    with torch.no_grad():
        net[1].running_var[5] = variance  # type: ignore[index]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for _ in range(2):
        loss = nn.functional.cross_entropy(net(torch.randn(4, 3, 8, 8)), torch.randint(0, 2, (4,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        for _ in range(2):
            net(torch.randn(4, 3, 8, 8))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_is_named_with_its_channel(guard: Guard, affine: bool, dtype: torch.dtype) -> None:
    run = guard(lambda: run_with(-50.0, affine, dtype))
    assert (run.first.cause, run.first.mode, run.first.module) == ("domain-error", "eval", "1")
    assert run.first.evidence["channel"] == 5
    assert run.first.evidence["operand_value"] < -30
    assert "in channel 5" in run.first.explanation
    assert run.first.fixes[0].action == "initialise-parameter"
    assert run.first.fixes[0].verified


def test_a_variance_of_zero_is_no_fault(guard: Guard) -> None:
    assert guard(lambda: run_with(0.0)).causes == []
