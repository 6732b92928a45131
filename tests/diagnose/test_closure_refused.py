"""A closure that is given to a scaler's step by its name, which PyTorch refuses while the scaler is enabled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


def trained(enabled: bool) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(3, 1), torch.randn(32, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=enabled)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
            out = model(data)
        loss = (out.float() - data.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        return loss

    for _ in range(4):
        closure()
        scaler.step(optimizer, closure=closure)
        scaler.update()


def test_a_closure_by_its_name(guard: Guard) -> None:
    def body() -> None:
        with pytest.raises(RuntimeError, match="Closure use"):
            trained(True)

    run = guard(body)
    assert (run.faults, run.causes) == (0, ["bypassed-scaler"]), run.stderr
    assert (run.first.step, run.first.location.code) == (0, "scaler.step(optimizer, closure=closure)")
    assert "optimizer.step(closure)" in run.first.fixes[0].how


def test_a_scaler_that_is_not_enabled(guard: Guard) -> None:
    run = guard(lambda: trained(False))
    assert (run.faults, run.causes) == (0, []), run.stderr
