"""Losses of several scalers that are differentiated in one backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


@pytest.mark.parametrize("summed", [False, True])
def test_each_scaler_divides_what_it_has_scaled(summed: bool, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        models = [nn.Linear(4, 2), nn.Linear(4, 2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        scalers: list[Any] = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (64.0, 1024.0)]
        for _ in range(6):
            x = torch.randn(8, 4)
            losses = []
            for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    out = model(x)
                losses.append(scaler.scale(out.float().square().mean()))
            torch.autograd.backward([sum(losses[1:], losses[0])] if summed else losses)
            for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert [i for i in run.report.incidents if i.severity != "info"] == []
