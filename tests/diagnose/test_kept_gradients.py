"""Gradients whose memory is kept: zeroed in place, or parts of a flat buffer that the optimizer updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import seed_everything

Guard = Callable[..., Any]
Clear = Callable[[torch.optim.Optimizer], None]
BAD_STEP = 12


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, clear: Clear, bad_step: int | None) -> None:
    """The loss scale settles in the first steps; in `bad_step` the derivative of a root at 0 is NaN."""
    scaler = torch.amp.GradScaler("cpu")
    for step in range(16):
        x = torch.randn(64, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x).float()
        loss = 30 * (out - x.sum(1, keepdim=True)).square().mean()
        if step == bad_step:
            loss = loss + (out * 0).pow(2).sum().sqrt()
        clear(optimizer)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 65536


def in_place(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def by_hand(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.zero_()


@pytest.mark.parametrize("clear", [in_place, by_hand])
def test_bad_gradient_is_news_after_the_scale_has_settled(guard: Guard, clear: Clear) -> None:
    """The gradients are the same tensors as those that overflowed in the first steps."""

    def body() -> None:
        seed_everything()
        model = net()
        train(model, torch.optim.SGD(model.parameters(), lr=1e-6), clear, BAD_STEP)

    run = guard(body)

    assert run.faults == 0, run.stderr
    assert sorted(run.causes) == ["loss-scale-overflow", "singular-gradient"], run.stderr
    assert run.first.step == BAD_STEP


def flat_buffer(model: nn.Module) -> Tensor:
    """A tensor in whose memory the model's weights and gradients lie."""
    parameters = list(model.parameters())
    buffer = torch.cat([p.detach().reshape(-1) for p in parameters])
    buffer.grad = torch.zeros_like(buffer)
    begin = 0
    for p in parameters:
        part = slice(begin, begin + p.numel())
        p.data, p.grad = buffer[part].view_as(p), buffer.grad[part].view_as(p)
        begin += p.numel()
    return buffer


@pytest.mark.parametrize("bad_step", [None, BAD_STEP])
def test_gradients_of_a_flat_buffer_are_its_members(guard: Guard, bad_step: int | None) -> None:
    """No backward pass reaches the buffer that the optimizer holds."""

    def body() -> None:
        seed_everything()
        model = net()
        train(model, torch.optim.SGD([flat_buffer(model)], lr=1e-6), in_place, bad_step)

    run = guard(body)

    assert run.faults == 0, run.stderr
    bad = [] if bad_step is None else ["singular-gradient"]
    assert sorted(run.causes) == ["loss-scale-overflow", *bad], run.stderr
    if bad_step is not None:
        assert run.first.step == bad_step
