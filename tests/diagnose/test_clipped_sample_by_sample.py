"""Gradients of one sample, clipped and summed outside of `.grad` (DP-SGD), while they are scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
LIMIT = 0.5


def trained(clip: Callable[[list[Tensor], float], list[Tensor]]) -> Callable[[], None]:
    """`clip` gets the gradients of a sample and the loss scale, and returns what is summed."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        params = list(model.parameters())
        for _ in range(4):
            scale = scaler.get_scale()
            summed = [torch.zeros_like(p) for p in params]
            for x in torch.randn(6, 1, 6):
                model.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    out = model(x)
                scaler.scale(nn.functional.cross_entropy(out.float(), x[:, :3].argmax(1))).backward()
                for total, part in zip(
                    summed, clip([p.grad for p in params if p.grad is not None], scale), strict=True
                ):
                    total.add_(part)
            for p, total in zip(params, summed, strict=True):
                p.grad = total / 6
            scaler.step(opt)
            scaler.update()

    return body


def norm_of(grads: list[Tensor]) -> Tensor:
    return torch.sqrt(torch.stack([g.pow(2).sum() for g in grads]).sum())


def by_a_tensor(grads: list[Tensor], scale: float) -> list[Tensor]:
    factor = (LIMIT / (norm_of(grads) + 1e-6)).clamp(max=1.0)
    return [g * factor for g in grads]


def by_a_divisor(grads: list[Tensor], scale: float) -> list[Tensor]:
    divisor = torch.clamp(norm_of(grads) / LIMIT, min=1.0)
    return [g / divisor for g in grads]


@pytest.mark.parametrize("clip", [by_a_tensor, by_a_divisor])
def test_a_limit_for_true_gradients(clip: Any, guard: Guard) -> None:
    run = guard(trained(clip))
    assert run.faults == 0, run.stderr
    incident = run.first
    assert (incident.cause, incident.step, incident.severity) == ("clip-before-unscale", 0, "error")
    assert incident.location.code.startswith("return [g ")


def by_a_scaled_limit(grads: list[Tensor], scale: float) -> list[Tensor]:
    factor = (LIMIT * scale / (norm_of(grads) + 1e-6)).clamp(max=1.0)
    return [g * factor for g in grads]


def by_its_own_length(grads: list[Tensor], scale: float) -> list[Tensor]:
    length = norm_of(grads).clamp(min=1e-12)
    return [g * (1024.0 / length) for g in grads]


def by_a_ratio(grads: list[Tensor], scale: float) -> list[Tensor]:
    factor = (norm_of(grads[:1]) / norm_of(grads)).clamp(max=0.5)
    return [g * factor for g in grads]


@pytest.mark.parametrize("clip", [by_a_scaled_limit, by_its_own_length, by_a_ratio])
def test_what_knows_the_scale_or_needs_none_is_silent(clip: Any, guard: Guard) -> None:
    run = guard(trained(clip))
    assert (run.faults, run.report.incidents) == (0, ()), run.stderr
