"""Gradients that are added to those of float32 masters, which nobody clears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


def training(pulls: str, dtype: torch.dtype = torch.float16, scale: float = 64.0, passes: int = 1) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)
    halves = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in halves]
    optimizer = torch.optim.SGD(masters, lr=1e-3)
    for _ in range(10):
        model.zero_grad()
        for _ in range(passes):
            x = torch.randn(12, 6, dtype=dtype)
            (nn.functional.cross_entropy(model(x).float(), torch.randint(4, (12,))) * scale).backward()
        for half, full in zip(halves, masters, strict=True):
            grad = half.grad.float() / scale
            if pulls == "new" or full.grad is None:
                full.grad = grad
            elif pulls == "copied":
                full.grad.copy_(grad)
            else:
                full.grad.add_(grad)
        if pulls == "added and clipped":
            torch.nn.utils.clip_grad_norm_(masters, 1e3)
        optimizer.step()
        with torch.no_grad():
            for half, full in zip(halves, masters, strict=True):
                half.copy_(full)
        if pulls == "added and cleared":
            for full in masters:
                full.grad.zero_()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pulls", ["added", "added and clipped"])
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_it_is_told(guard: Guard, pulls: str, dtype: torch.dtype, scale: float) -> None:
    run = guard(lambda: training(pulls, dtype, scale))
    assert run.faults == 0, run.stderr
    (incident,) = [i for i in run.report.incidents if i.severity == "error"]
    assert (incident.cause, incident.location.code) == ("missing-zero-grad", "optimizer.step()")
    assert "optimizer.zero_grad()" in incident.fixes[0].how


@pytest.mark.parametrize("pulls", ["new", "copied", "added and cleared"])
@pytest.mark.parametrize("passes", [1, 2])
def test_what_is_right_is_not(guard: Guard, pulls: str, passes: int) -> None:
    run = guard(lambda: training(pulls, passes=passes))
    assert run.faults == 0, run.stderr
    assert [i for i in run.report.incidents if i.severity != "info"] == []


def test_what_a_skipped_window_has_left_in_masters_is_no_new_failure(guard: Guard) -> None:
    """The script looks at the masters' gradients, skips the step, and leaves them there until it puts others in their place."""

    def body() -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).half()
        halves = list(model.parameters())
        masters = [p.detach().float().clone() for p in halves]
        optimizer = torch.optim.AdamW(masters, lr=1e-3)
        scale, skipped = 2.0**18, 0
        for window in range(40):
            for _ in range(1 if window % 10 == 9 else 3):
                x = torch.randn(12, 6, dtype=torch.float16)
                loss = nn.functional.cross_entropy(model(x).float(), torch.randint(4, (12,)))
                (loss * scale).backward()
            for half, full in zip(halves, masters, strict=True):
                full.grad = half.grad.float() / scale
            if all(full.grad.isfinite().all() for full in masters):
                nn.utils.clip_grad_norm_(masters, 1.0)
                optimizer.step()
                with torch.no_grad():
                    for half, full in zip(halves, masters, strict=True):
                        half.copy_(full)
                scale *= 2.0
            else:
                skipped += 1
                scale /= 2.0
            for half in halves:
                half.grad = None
        return skipped

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.result > 5
    assert [i for i in run.report.incidents if i.severity != "info"] == []
