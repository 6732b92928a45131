"""Averages in bfloat16 that one operator writes for all weights, by the script or by PyTorch's `AveragedModel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from watching import fingerprint

Guard = Callable[..., Any]
Write = Callable[[list[Tensor], list[Tensor], float], Any]


def _sum(mean: list[Tensor], weights: list[Tensor], share: float) -> None:
    torch._foreach_mul_(mean, 1 - share)
    torch._foreach_add_(mean, weights, alpha=share)


def _difference(mean: list[Tensor], weights: list[Tensor], share: float) -> None:
    torch._foreach_add_(mean, torch._foreach_sub(weights, mean), alpha=share)


WRITES: dict[str, Write] = {
    "interpolated": lambda mean, weights, share: torch._foreach_lerp_(mean, weights, share),
    "multiplied and added": _sum,
    "a difference": _difference,
}


def train(write: Write | None, share: float, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    net = net.to(dtype) if write is None else net
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(1 - share)) if write is None else None
    mean = [p.detach().to(dtype, copy=True) for p in net.parameters()]
    for _ in range(72):
        x = torch.randn(8, 8).to(net[0].weight.dtype)
        loss = (net(x) - x[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if averaged is not None:
            averaged.update_parameters(net)
        elif write is not None:
            with torch.no_grad():
                write(mean, [p.detach().to(dtype) for p in net.parameters()], share)
    return fingerprint(net, optimizer)


@pytest.mark.parametrize("name", [*WRITES, None])
def test_an_average_that_stands_still(name: str | None, guard: Guard) -> None:
    write = WRITES[name] if name is not None else None
    plain = train(write, 0.0002, torch.bfloat16)
    run = guard(lambda: train(write, 0.0002, torch.bfloat16))
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert run.causes == ["lost-update"]
    incident = run.first
    assert (incident.severity, incident.dtype) == ("warning", "bfloat16")
    assert any(word in incident.location.code for word in ("_foreach", "update_parameters"))
    assert incident.evidence["update"] < incident.evidence["spacing"]


@pytest.mark.parametrize(("share", "dtype"), [(0.5, torch.bfloat16), (0.0002, torch.float32)])
@pytest.mark.parametrize("name", [*WRITES, None])
def test_an_average_that_moves(name: str | None, share: float, dtype: torch.dtype, guard: Guard) -> None:
    run = guard(lambda: train(WRITES[name] if name is not None else None, share, dtype))
    assert (run.faults, run.causes) == (0, [])
