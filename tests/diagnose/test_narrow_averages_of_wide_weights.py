"""An average in bfloat16 of float32 weights, plain tensors by their names, from the start or from later on."""

from __future__ import annotations

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
