"""Half-precision weights under a scaler: only those that are trained have to be float32 (adapters on a frozen model)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


@pytest.mark.parametrize("of_all", [True, False])
@pytest.mark.parametrize("is_repaired", [False, True])
def test_adapters_on_a_frozen_model_in_half_precision(is_repaired: bool, of_all: bool, guard: Guard) -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).half()
        model[0].requires_grad_(False)
        if is_repaired:  # as the fix says
            for p in model.parameters():
                p.data = p.data.float() if p.requires_grad else p.data
        optimizer = torch.optim.SGD([p for p in model.parameters() if of_all or p.requires_grad], lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(5, 4)).float().pow(2).mean()
        scaler.scale(loss).backward()
        if not is_repaired:
            with pytest.raises(ValueError, match="unscale FP16"):
                scaler.step(optimizer)
            return
        scaler.step(optimizer)
        scaler.update()

    run = guard(body)
    assert run.faults == 0, run.stderr
    if is_repaired:
        assert run.causes == []
        return
    assert run.first.cause == "fp16-parameters"
    assert "2 of the 2 trained parameters" in run.first.explanation
    assert "p.data.float() if p.requires_grad else p.data" in run.first.fixes[0].how
