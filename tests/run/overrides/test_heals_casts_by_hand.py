"""Healing reaches what the script itself casts to float16: in a module, and in a loss by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.diagnose.fixes import trying


class Pooled(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if self.dtype == torch.float32:
            return h.square().cumsum(1)[:, -1]
        return h.to(torch.float16).square().cumsum(1)[:, -1]


def train_pool(dtype: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    net = nn.ModuleDict({"pool": Pooled(dtype), "head": nn.Linear(8, 1)})
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    losses = []
    for step in range(8):
        x = torch.randn(6, 5, 4) * (300 if step >= 4 else 1)
        with torch.autocast("cpu", torch.float16, enabled=dtype != torch.float32):
            loss = torch.tanh(net["head"](net["pool"](x).float() / 1e5)).float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_loss(dtype: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    net = nn.Linear(4, 8)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    losses = []
    for step in range(8):
        logits = net(torch.randn(6, 4)) * (1e6 if step >= 4 else 1)
        low = logits.half() if dtype == torch.float16 else logits
        loss = torch.logsumexp(low, -1).float().mean().log1p()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("train", [train_pool, train_loss])
def test_the_run_goes_on_as_in_float32(train: Callable[[torch.dtype], list[float]], overridden: Any) -> None:
    wanted = train(torch.float32)
    with overridden(on_nonfinite="heal") as session:
        losses = train(torch.float16)
    assert losses == pytest.approx(wanted, rel=2e-2)
    (healed,) = session.report.run["healed"]
    assert (healed["step"], healed["action"]) == (4, "force-fp32")


def train_discriminator(dtype: torch.dtype) -> list[float]:
    """`1 - p` is 0 where p is 0.999: in bfloat16, to which the script casts what its model gives, autocast or not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
    with torch.no_grad():
        net[0].weight.fill_(1.1)
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)
    losses = []
    for step in range(10):
        x = torch.full((4, 2), 3.6 if step >= 4 else 0.1) + 0.1 * torch.rand(4, 2)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            fake = net(x)
        if dtype != torch.float32:
            fake = fake.bfloat16()
        loss = -torch.log(1.0 - fake).float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_cast_that_would_undo_the_fix_is_lifted_too(overridden: Any) -> None:
    wanted = train_discriminator(torch.float32)
    with overridden(on_nonfinite="heal") as session:
        losses = train_discriminator(torch.bfloat16)
    assert losses == pytest.approx(wanted, rel=2e-2)
    (healed,) = session.report.run["healed"]
    assert (healed["step"], healed["action"]) == (4, "force-fp32")
    fixes = {fix.action: fix.how for fix in session.report.incidents[0].fixes if fix.verified}
    assert fixes["force-fp32"].endswith("leave out the cast to bfloat16 in: fake = fake.bfloat16()")
    assert fixes["disable-amp"].endswith("in place of the script's own casts in: fake = fake.bfloat16()")


def test_a_change_of_precision_lifts_the_casts_too(overridden: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying, "smallest_float32_region", lambda *_: None)
    with overridden(on_nonfinite="heal") as session:
        losses = train_discriminator(torch.bfloat16)
    assert losses == pytest.approx(train_discriminator(torch.float32), rel=2e-2)
    (healed,) = session.report.run["healed"]
    assert (healed["step"], healed["action"]) == (4, "disable-amp")
