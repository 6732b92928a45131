"""An average of gradients that a script keeps: an overflow stays in it, though the step was skipped in which it came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
OVERFLOW = 12


def train(scaler: Any, keeps_bad: bool) -> None:
    """The gradients are true ones when they are added to the average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    kept: dict[str, Tensor] = {}
    for it in range(20):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.randn(64, 4))
        loss = out.float().square().mean() * (1e4 if it == OVERFLOW else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if keeps_bad or all(bool(g.isfinite().all()) for g in grads.values()):
            for name, p in model.named_parameters():
                kept[name] = kept.get(name, torch.zeros_like(p)) * 0.9 + grads[name] * 0.1
                p.grad = grads[name] + 2 * kept[name]
        scaler.step(opt)
        scaler.update()


def test_the_line_that_adds_it_is_named(guard: Guard) -> None:
    run = guard(lambda: train(torch.amp.GradScaler("cpu", init_scale=65536.0), keeps_bad=True))

    assert run.faults == 0, run.stderr
    incident = run.report.incidents[0]
    assert incident.cause == "nonfinite-parameter"
    assert incident.evidence["gradients_changed_at"]["code"] == "p.grad = grads[name] + 2 * kept[name]"
    assert "the gradients of that update were finite" not in incident.explanation
    assert incident.fixes[0].action == "call-order"


@pytest.mark.parametrize("scale", [256.0, 65536.0])
def test_an_average_that_takes_in_finite_ones_only(scale: float, guard: Guard) -> None:
    run = guard(lambda: train(torch.amp.GradScaler("cpu", init_scale=scale), keeps_bad=False))

    assert run.faults == 0, run.stderr
    assert run.report.status == "clean"
