"""A scaler that was needed at first: float16 gives way to bfloat16 in the middle of the run, and the loss is scaled on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
STEPS = 48


def script(dtype_at: Callable[[int], torch.dtype], stays_on: bool = True) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(STEPS):
            x, dtype = torch.randn(8, 6), dtype_at(step)
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                model(x)
            with torch.autocast("cpu", dtype=dtype):
                out = model(x)
            optimizer.zero_grad()
            loss = F.cross_entropy(out.float(), x[:, :3].argmax(1))
            if stays_on or dtype is torch.float16:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()

    return body


def after_20(step: int) -> torch.dtype:
    return torch.float16 if step < 20 else torch.bfloat16


def test_scaler_that_stays_on(guard: Guard) -> None:
    run = guard(script(after_20))
    assert run.faults == 0, run.stderr
    assert run.causes == ["needless-scaler"]
    assert (run.first.severity, run.first.dtype) == ("warning", "bfloat16")
    assert 20 <= run.first.step <= 32
    assert "any more" in run.first.explanation


@pytest.mark.parametrize(
    ("dtype_at", "stays_on"),
    [
        (after_20, False),
        (lambda step: torch.float16, True),
        (lambda step: torch.float16 if step % 3 else torch.bfloat16, True),
        (lambda step: torch.bfloat16 if 28 <= step < 44 else torch.float16, True),
    ],
)
def test_scalers_that_are_needed(dtype_at: Any, stays_on: bool, guard: Guard) -> None:
    run = guard(script(dtype_at, stays_on))
    assert run.faults == 0, run.stderr
    assert run.causes == []
