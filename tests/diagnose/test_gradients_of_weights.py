"""Gradients that a script makes of weights alone (Reptile): a scaler that steps with them divides what carries no scale."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]


def script(of: Callable[[nn.Parameter, nn.Parameter, float], Tensor], is_scaled: bool) -> Callable[[], None]:
    """An inner loop on a copy, then a step of the outer optimizer along what `of` makes of both."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        outer = torch.optim.SGD(net.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(6):
            outer.zero_grad()
            totals = [torch.zeros_like(p) for p in net.parameters()]
            for _ in range(2):
                fast = copy.deepcopy(net)
                inner = torch.optim.SGD(fast.parameters(), lr=0.05)
                for _ in range(3):
                    x = torch.randn(16, 2)
                    with torch.autocast("cpu", dtype=torch.float16):
                        out = fast(x)
                    inner.zero_grad()
                    scaler.scale(F.mse_loss(out.float(), x[:, :1].sin())).backward()
                    scaler.step(inner)
                    scaler.update()
                with torch.autocast("cpu", dtype=torch.float16):
                    out = fast(x)
                inner.zero_grad()
                scaler.scale(F.mse_loss(out.float(), x[:, :1].sin())).backward()
                for total, p, q in zip(totals, net.parameters(), fast.parameters(), strict=True):
                    total += of(p, q, scaler.get_scale()) / 2
            for p, total in zip(net.parameters(), totals, strict=True):
                p.grad = total
            if is_scaled:
                scaler.step(outer)
                scaler.update()
            else:
                outer.step()

    return body


def away(p: nn.Parameter, q: nn.Parameter, scale: float) -> Tensor:
    return p.detach() - q.detach()


def away_scaled(p: nn.Parameter, q: nn.Parameter, scale: float) -> Tensor:
    return (p.detach() - q.detach()) * scale


def of_first_order(p: nn.Parameter, q: nn.Parameter, scale: float) -> Tensor:
    assert q.grad is not None
    return q.grad


def reptile(is_scaled: bool) -> Callable[[], None]:
    """Without the last loss: nothing is differentiated between the inner step and the difference."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        outer = torch.optim.SGD(net.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(6):
            outer.zero_grad()
            totals = [torch.zeros_like(p) for p in net.parameters()]
            for _ in range(2):
                fast = copy.deepcopy(net)
                inner = torch.optim.SGD(fast.parameters(), lr=0.05)
                for _ in range(3):
                    x = torch.randn(16, 2)
                    with torch.autocast("cpu", dtype=torch.float16):
                        out = fast(x)
                    inner.zero_grad()
                    scaler.scale(F.mse_loss(out.float(), x[:, :1].sin())).backward()
                    scaler.step(inner)
                    scaler.update()
                for total, p, q in zip(totals, net.parameters(), fast.parameters(), strict=True):
                    total += (p.detach() - q.detach()) / 2
            for p, total in zip(net.parameters(), totals, strict=True):
                p.grad = total
            if is_scaled:
                scaler.step(outer)
                scaler.update()
            else:
                outer.step()

    return body


def test_a_scaler_that_divides_differences_of_weights(guard: Guard) -> None:
    run = guard(reptile(is_scaled=True))
    assert run.faults == 0, run.stderr
    assert run.causes == ["unscaled-backward"]
    assert (run.first.evidence["factor"], run.first.location.code) == (1 / 256, "scaler.step(outer)")
    assert run.first.evidence["first"]["code"] == "total += (p.detach() - q.detach()) / 2"
    assert run.first.fixes[0].how.endswith("outer.step()")


RIGHT = {
    "stepped past the scaler": reptile(is_scaled=False),
    "multiplied by the scale": script(away_scaled, is_scaled=True),
    "scaled gradients of the copies": script(of_first_order, is_scaled=True),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_silent(guard: Guard, name: str) -> None:
    run = guard(RIGHT[name])
    assert run.faults == 0, run.stderr
    assert run.causes == []
