"""An average in bfloat16 of float32 weights, plain tensors by their names, from the start or from later on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.capture.protocol import averages

Guard = Callable[..., Any]


def train(first: int, decay: float, dtype: torch.dtype) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        shadow: dict[str, Tensor] = {}
        for step in range(130):
            x = torch.randn(8, 8)
            loss = (net(x) - x[:, :4]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == first:
                shadow = {name: p.detach().to(dtype, copy=True) for name, p in net.named_parameters()}
            with torch.no_grad():
                for name, p in net.named_parameters():
                    if shadow:
                        shadow[name].mul_(decay).add_(p.to(dtype), alpha=1 - decay)

    return body


@pytest.mark.parametrize("first", [0, 70])
def test_stands_still(first: int, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averages, "EVERY", 32)
    run = guard(train(first, 0.9998, torch.bfloat16))
    assert run.faults == 0, run.stderr
    assert run.causes == ["lost-update"]
    assert (run.first.dtype, first <= run.first.step <= first + 32) == ("bfloat16", True)
    assert "shadow[name].mul_(decay)" in run.first.location.code


@pytest.mark.parametrize(("decay", "dtype"), [(0.5, torch.bfloat16), (0.9998, torch.float32)])
def test_moves(decay: float, dtype: torch.dtype, guard: Guard) -> None:
    run = guard(train(0, decay, dtype))
    assert (run.faults, run.causes) == (0, [])


@pytest.mark.parametrize("warmup", [0, 18])
@pytest.mark.parametrize("interpolates", [True, False])
def test_a_narrow_copy_of_the_model(warmup: int, interpolates: bool, guard: Guard) -> None:
    """Its weights are the trained ones at first (a warm-up), or not; those are cast to its dtype before they are added."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        average = copy.deepcopy(net).bfloat16().requires_grad_(False)
        for step in range(72):
            x = torch.randn(8, 8)
            loss = (net(x) - x[:, :4]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step < warmup:
                average.load_state_dict(net.state_dict())
                continue
            with torch.no_grad():
                for mean, p in zip(average.parameters(), net.parameters(), strict=True):
                    if interpolates:
                        mean.lerp_(p.to(mean.dtype), 1e-4)
                    else:
                        mean.mul_(0.9999).add_(p.to(mean.dtype), alpha=1e-4)

    run = guard(body)
    assert (run.faults, run.causes) == (0, ["lost-update"])
    assert run.first.step in (16, 19, 20)
    assert "mean" in run.first.location.code
