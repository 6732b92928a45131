"""Gradients that are flushed to zero because the loss scale has collapsed: what made it collapse is the failure."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from watching import Watched, seed_everything

Guard = Callable[..., Watched]


def training(scale: float, bad: range, steps: int) -> None:
    """The batches of `bad` do not fit float16: the scaler lowers the scale each time, and does not raise it so soon."""
    seed_everything()
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for step in range(steps):
        opt.zero_grad()
        x = torch.randn(64, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
            logits = out * 3e5 if step in bad else out
        loss = logits.float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()


def errors(run: Watched) -> list[str]:
    assert run.faults == 0, run.stderr
    return [i.cause for i in run.report.incidents if i.severity != "info"]


def test_it_is_counted_as_a_consequence(guard: Guard) -> None:
    run = guard(lambda: training(2.0**-1, range(10, 25), 140))
    assert errors(run) == ["fp16-overflow"]
    assert run.first.evidence["later_failures_caused_by_it"] >= 1
    assert "Failures that follow from it: gradient-underflow in step" in run.first.explanation


def test_a_scale_that_was_too_low_from_the_beginning_is_an_incident(guard: Guard) -> None:
    assert errors(guard(lambda: training(2.0**-16, range(0), 60))) == ["gradient-underflow"]


def test_it_is_one_beside_a_batch_that_has_hardly_lowered_the_scale(guard: Guard) -> None:
    run = guard(lambda: training(2.0**-16, range(10, 13), 40))
    assert sorted(errors(run)) == ["fp16-overflow", "gradient-underflow"]
