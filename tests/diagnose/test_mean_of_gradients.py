"""Gradients that a script mixes with those of another model, as ranks do by hand, and leaves the scale in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]


def script(outputs: int, reads: bool, assigns: bool) -> Callable[[], list[float]]:
    def body() -> list[float]:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, outputs))]
        models.append(copy.deepcopy(models[0]))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        log = []
        for _ in range(24):
            for model, optimizer in zip(models, optimizers, strict=True):
                x = torch.randn(16, 6)
                with torch.autocast("cpu", dtype=torch.float16):
                    out = model(x)
                optimizer.zero_grad()
                scaler.scale(F.mse_loss(out.float(), x[:, :outputs])).backward()
            if reads:
                log.append(scaler.get_scale())
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.grad for p in parameters]).mean(0)
                for p in parameters:
                    assert p.grad is not None
                    if assigns:
                        p.grad = mean
                    else:
                        p.grad.copy_(mean)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        return log

    return body


@pytest.mark.parametrize("outputs", [1, 5])
@pytest.mark.parametrize(("reads", "assigns"), [(True, False), (False, False), (False, True)])
def test_a_mean_of_gradients_is_no_norm(outputs: int, reads: bool, assigns: bool, guard: Guard) -> None:
    """Nor where it has one element only."""
    run = guard(script(outputs, reads, assigns))
    assert run.faults == 0, run.stderr
    assert run.causes == []
