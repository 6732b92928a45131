"""Limits of clipping: one that knows the loss scale by an attribute, and a norm that was computed before."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import utils

Guard = Callable[..., Any]


def trained(clip: Callable[[nn.Module, Any, Any], None]) -> Callable[[], None]:
    """`clip` gets the model, the scaler and what the script knows of it before each backward pass."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
        known = SimpleNamespace(scale=1.0, limit=1.0)
        for _ in range(5):
            known.scale = scaler.get_scale()
            known.limit = 0.5 * known.scale
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(16, 4))
            scaler.scale(out.float().square().mean()).backward()
            clip(model, scaler, known)
            scaler.step(opt)
            scaler.update()

    return body


def by_a_limit_that_is_scaled(model: nn.Module, scaler: Any, known: Any) -> None:
    utils.clip_grad_norm_(model.parameters(), known.limit)


def by_a_norm_that_is_divided(model: nn.Module, scaler: Any, known: Any) -> None:
    norm = utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    utils.clip_grads_with_norm_(model.parameters(), 0.5, norm / known.scale)


@pytest.mark.parametrize("clip", [by_a_limit_that_is_scaled, by_a_norm_that_is_divided])
def test_what_knows_the_scale_is_silent(clip: Callable[[nn.Module, Any, Any], None], guard: Guard) -> None:
    run = guard(trained(clip))
    assert (run.faults, run.report.incidents) == (0, ()), run.stderr


def by_a_scaled_norm(model: nn.Module, scaler: Any, known: Any) -> None:
    norm = utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)


def test_clipped_by_a_norm_that_is_still_scaled(guard: Guard) -> None:
    run = guard(trained(by_a_scaled_norm))

    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.severity) == ("clip-before-unscale", 0, "error")
    assert incident.location.code == "utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)"
