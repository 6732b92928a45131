"""Models of plain tensors: their weights hang in no module, and are called what the script calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Guard = Callable[..., Any]


def train(dtype: torch.dtype, rate: float, scale: float, autocast: bool) -> None:
    torch.manual_seed(0)
    weights = {"w1": torch.randn(6, 16) * 0.3, "b1": torch.zeros(16), "w2": torch.randn(16, 3) * 0.3}
    weights = {name: weight.to(dtype).requires_grad_() for name, weight in weights.items()}
    optimizer = torch.optim.SGD(weights.values(), rate)
    for _ in range(40):
        x = torch.randn(10, 6, dtype=dtype)
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            out = torch.tanh(x @ weights["w1"] + weights["b1"]) @ weights["w2"]
            loss = nn.functional.mse_loss(out.float(), x[:, :3].float()) * scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_gradients_lost_under_autocast(guard: Guard) -> None:
    first = guard(lambda: train(torch.float32, 1e-2, 1e-7, autocast=True)).first
    assert (first.cause, first.step) == ("gradient-underflow", 0)
    assert "weights['w1'] " in first.explanation
    assert first.fixes[0].verified


def test_updates_lost_in_bfloat16(guard: Guard) -> None:
    first = guard(lambda: train(torch.bfloat16, 1e-6, 1.0, autocast=False)).first
    assert (first.cause, first.module) == ("lost-update", None)
    assert "weights['w1']" in first.explanation


def test_a_gradient_that_is_not_finite(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        scale = torch.ones(3).requires_grad_()
        shift = torch.zeros(3).requires_grad_()
        optimizer = torch.optim.SGD([scale, shift], 1e-2)
        for step in range(4):
            x = torch.randn(8, 3).abs() * (0 if step == 2 else 1)
            loss = ((x * scale).sqrt() + shift).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step) == ("singular-gradient", 2)
    assert (first.evidence["parameters"]["nonfinite"], first.evidence["parameters"]["finite"]) == (["scale"], ["shift"])
