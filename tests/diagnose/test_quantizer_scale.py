"""Scales of float8: made for smaller values, infinite in one part, and right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Delayed(nn.Module):
    """The scale is made of the largest |x| of every eighth call; a shortcut around what the format cuts off is its gradient."""

    def __init__(self, dtype: torch.dtype, clamps: bool) -> None:
        super().__init__()
        self.register_buffer("amax", torch.tensor(1.0))
        self.dtype, self.clamps, self.calls = dtype, clamps, 0
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.calls % 8 == 0:
            self.amax.copy_(x.detach().abs().max())  # type: ignore[operator]
        self.calls += 1
        limit = torch.finfo(self.dtype).max
        scale = limit / self.amax  # type: ignore[operator]
        scaled = x * scale
        if self.clamps:
            scaled = scaled.clamp(-limit, limit)
        stored = scaled.to(self.dtype)
        return self.linear(x + (stored.to(x.dtype) / scale - x).detach())


def train(layer: nn.Module, x: Callable[[int], Tensor]) -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for step in range(8):
        loss = layer(x(step)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def growing(step: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, 32).reshape(4, 8) * (1.0 if step < 5 else 2.0)


def test_a_scale_that_was_made_for_smaller_values(guard: Guard) -> None:
    run = guard(lambda: train(Delayed(torch.float8_e5m2, False), growing))
    assert (run.first.cause, run.first.step, run.first.op) == ("quantizer-scale", 5, "aten._to_copy.default")
    facts = run.first.evidence
    assert (facts["state"], facts["format"], facts["limit"]) == ("saturated", "float8_e5m2", 57344.0)
    assert facts["max_abs"] == pytest.approx(2 * 57344.0)
    assert "2 times too large" in run.first.explanation
    assert "clamp" in [fix.action for fix in run.first.fixes if fix.verified]


def test_a_clamp_before_the_cast_is_healthy(guard: Guard) -> None:
    assert guard(lambda: train(Delayed(torch.float8_e5m2, True), growing)).causes == []


def test_an_overflow_of_float16_remains_one(guard: Guard) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear((x * 1e5).half().float())  # type: ignore[no-any-return]

    run = guard(lambda: train(Half(), growing))
    assert run.first.cause == "fp16-overflow"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_healthy_training_with_float8_is_silent(dtype: torch.dtype, guard: Guard) -> None:
    run = guard(lambda: train(Delayed(dtype, True), lambda step: torch.randn(4, 8)))
    assert (run.faults, run.causes) == (0, [])
