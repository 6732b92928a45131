"""Gradients of one sample, clipped and summed outside of `.grad` (DP-SGD), while they are scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
LIMIT = 0.5


def trained(clip: Callable[[list[Tensor], float], list[Tensor]], takes: bool = False) -> Callable[[], None]:
    """`clip` gets the gradients of a sample and the loss scale, and returns what is summed.

    `takes`: they are those that `torch.autograd.grad` returns, and none is ever in `.grad`.
    """

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
                loss = scaler.scale(nn.functional.cross_entropy(out.float(), x[:, :3].argmax(1)))
                if takes:
                    grads = list(torch.autograd.grad(loss, params))
                else:
                    loss.backward()
                    grads = [p.grad for p in params if p.grad is not None]
                for total, part in zip(summed, clip(grads, scale), strict=True):
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


def all_at_once(grads: list[Tensor], scale: float) -> list[Tensor]:
    return list(torch._foreach_mul(grads, (LIMIT / (norm_of(grads) + 1e-6)).clamp(max=1.0)))


@pytest.mark.parametrize("clip", [by_a_tensor, by_a_divisor])
@pytest.mark.parametrize("takes", [False, True])
def test_a_limit_for_true_gradients(clip: Any, takes: bool, guard: Guard) -> None:
    run = guard(trained(clip, takes))
    assert run.faults == 0, run.stderr
    incident = run.first
    assert (incident.cause, incident.step, incident.severity) == ("clip-before-unscale", 0, "error")
    assert incident.location.code.startswith("return [g ")


def test_taken_gradients_that_are_clipped_by_one_call(guard: Guard) -> None:
    run = guard(trained(all_at_once, takes=True))
    assert (run.faults, run.causes) == (0, ["clip-before-unscale"]), run.stderr
    assert run.first.location.code.startswith("return list(torch._foreach_mul(")
    assert run.first.evidence["first"]["code"] == "grads = list(torch.autograd.grad(loss, params))"
    assert run.first.evidence["factor"] == 1024.0
    assert "multiply the limit by scaler.get_scale()" in run.first.fixes[0].how


def by_a_scaled_limit(grads: list[Tensor], scale: float) -> list[Tensor]:
    factor = (LIMIT * scale / (norm_of(grads) + 1e-6)).clamp(max=1.0)
    return [g * factor for g in grads]


def by_its_own_length(grads: list[Tensor], scale: float) -> list[Tensor]:
    length = norm_of(grads).clamp(min=1e-12)
    return [g * (1024.0 / length) for g in grads]


def by_a_ratio(grads: list[Tensor], scale: float) -> list[Tensor]:
    factor = (norm_of(grads[:1]) / norm_of(grads)).clamp(max=0.5)
    return [g * factor for g in grads]


def by_the_scale_first(grads: list[Tensor], scale: float) -> list[Tensor]:
    true = [g / scale for g in grads]
    factor = (LIMIT / (norm_of(true) + 1e-6)).clamp(max=1.0)
    return [g * scale * factor for g in true]


@pytest.mark.parametrize("clip", [by_a_scaled_limit, by_its_own_length, by_a_ratio, by_the_scale_first])
@pytest.mark.parametrize("takes", [False, True])
def test_what_knows_the_scale_or_needs_none_is_silent(clip: Any, takes: bool, guard: Guard) -> None:
    run = guard(trained(clip, takes))
    assert (run.faults, run.report.incidents) == (0, ()), run.stderr
