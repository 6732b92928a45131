"""x / Inf is 0: an overflow that the forward pass hides, and that only lost gradients tell of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

Guard = Callable[..., Any]


class Energy(nn.Module):
    """Divides by the sum of squares."""

    def forward(self, x: Tensor) -> Tensor:
        energy = (x * x).sum(-1, keepdim=True)
        return x / energy


class Net(nn.Module):
    def __init__(self, gain: float, is_inline: bool = False) -> None:
        super().__init__()
        self.gain, self.is_inline = gain, is_inline
        self.embed, self.norm = nn.Linear(16, 64), Energy()
        self.head = nn.Identity() if is_inline else nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) * self.gain
        return hidden if self.is_inline else self.head(self.norm(hidden))


def train(gain: float, dtype: torch.dtype, is_inline: bool = False) -> None:
    torch.manual_seed(0)
    net = Net(gain, is_inline)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype is torch.float16)
    for _ in range(24):
        x = torch.randn(32, 16)
        with torch.autocast("cpu", dtype=dtype):
            out = net(x)
            if is_inline:
                out = out / (out * out).sum(-1, keepdim=True)
            loss = functional.cross_entropy(out.float(), x[:, :4].argmax(1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def test_it_is_told_as_what_it_is(guard: Guard) -> None:
    (incident,) = guard(lambda: train(300.0, torch.float16)).report.incidents
    assert (incident.cause, incident.severity, incident.phase) == ("fp16-overflow", "warning", "forward")
    assert (incident.module, incident.op) == ("norm", "aten.mul.Tensor")
    assert incident.location.code == "energy = (x * x).sum(-1, keepdim=True)"
    assert incident.evidence["max_abs_fp32"] > 65504
    assert incident.evidence["lost_gradients"]["embed.weight"] == 1.0
    fixes = {fix.action: fix.verified for fix in incident.fixes}
    assert fixes == {"force-fp32": True, "use-bf16": True, "disable-amp": True}


def test_outside_every_module(guard: Guard) -> None:
    (incident,) = guard(lambda: train(300.0, torch.float16, is_inline=True)).report.incidents
    assert (incident.cause, incident.module, incident.op) == ("fp16-overflow", None, "aten.mul.Tensor")
    assert incident.fixes[0].action == "force-fp32"
    assert incident.fixes[0].target.startswith("test_hidden_overflow.py:")
    assert incident.fixes[0].verified


@pytest.mark.parametrize(("gain", "dtype"), [(1.0, torch.float16), (300.0, torch.bfloat16)])
def test_what_fits_is_none(gain: float, dtype: torch.dtype, guard: Guard) -> None:
    assert guard(lambda: train(gain, dtype)).report.incidents == ()
