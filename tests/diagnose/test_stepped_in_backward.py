"""Optimizers that step in hooks, in the middle of the backward pass of a scaled loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
SCALE = 512.0


def train(
    step: Callable[[Tensor, torch.optim.Optimizer, Any], None], divides_before: bool = False, **options: Any
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    opts = {p: torch.optim.Adam([p], lr=1e-3, **options) for p in net.parameters()}

    def hook(p: Tensor) -> None:
        step(p, opts[p], scaler)
        opts[p].zero_grad()

    for p in net.parameters():
        if divides_before:
            p.register_hook(lambda g: g / SCALE)
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(6):
        x = torch.randn(16, 6)
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(x)
        scaler.scale((out.float() - x[:, :1]).square().mean()).backward()
        if step is by_the_scaler:
            scaler.update()


def past_the_scaler(p: Tensor, opt: torch.optim.Optimizer, scaler: Any) -> None:
    opt.step()  # too early


def by_the_scaler(p: Tensor, opt: torch.optim.Optimizer, scaler: Any) -> None:
    scaler.step(opt)


def divided(p: Tensor, opt: torch.optim.Optimizer, scaler: Any) -> None:
    assert p.grad is not None
    p.grad.div_(SCALE)
    opt.step()


def test_with_the_gradients_as_they_come(guard: Guard) -> None:
    run = guard(lambda: train(past_the_scaler))
    assert (run.faults, run.causes) == (0, ["bypassed-scaler"])
    incident = run.first
    assert (incident.step, incident.severity, incident.evidence["factor"]) == (0, "error", SCALE)
    assert incident.location is not None
    assert incident.location.code == "opt.step()  # too early"
    assert "once, behind the backward pass" in incident.fixes[0].how


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_by_the_scaler(options: dict[str, Any], guard: Guard) -> None:
    run = guard(lambda: train(by_the_scaler, **options))
    assert (run.faults, run.causes) == (0, [])


@pytest.mark.parametrize("before", [True, False])
def test_with_gradients_that_were_divided(before: bool, guard: Guard) -> None:
    run = guard(lambda: train(past_the_scaler if before else divided, divides_before=before))
    assert (run.faults, run.causes) == (0, [])


def clipped(p: Tensor, opt: torch.optim.Optimizer, scaler: Any) -> None:
    torch.nn.utils.clip_grad_norm_([p], 3.0)
    opt.step()  # too early


def divided_and_clipped(p: Tensor, opt: torch.optim.Optimizer, scaler: Any) -> None:
    assert p.grad is not None
    p.grad.div_(SCALE)
    torch.nn.utils.clip_grad_norm_([p], 1e-3)
    opt.step()


def test_with_gradients_that_were_clipped_with_the_scale_in_them(guard: Guard) -> None:
    run = guard(lambda: train(clipped))
    assert (run.faults, run.causes) == (0, ["bypassed-scaler"])
    assert 1.5 < run.first.evidence["factor"] < SCALE
    assert run.first.location is not None
    assert run.first.location.code == "opt.step()  # too early"
    assert "clipped in between" in run.first.explanation


def test_with_gradients_that_were_divided_and_then_clipped(guard: Guard) -> None:
    run = guard(lambda: train(divided_and_clipped))
    assert (run.faults, run.causes) == (0, [])


def test_optimizers_that_are_kept_by_their_parameter_have_short_names(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        of = {p: torch.optim.SGD([p], lr=1e-5) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: of[p].step())  # type: ignore[index]
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0)
        for _ in range(4):
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(16, 4))
            scaler.scale(out.float().square().mean()).backward()

    run = guard(body)
    assert run.faults == 0, run.stderr
    first = run.report.incidents[0]
    assert first.cause == "bypassed-scaler"
    assert "tensor(" not in first.explanation
