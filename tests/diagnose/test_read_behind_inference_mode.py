"""Figures of an evaluation that are computed on one side of an inference-mode region and read on the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]


def votes(scores: Tensor, gain: float) -> Tensor:
    weights = torch.exp(scores.abs() * gain)  # made
    return weights / weights.sum(1, keepdim=True)


def behind(net: nn.Module, x: Tensor, gain: float) -> Tensor:
    with torch.inference_mode():
        shares = votes(net(x), gain)
        print((shares.argmax(1) == 0).float().mean().item())
    return F.nll_loss(shares.log(), torch.zeros(8, dtype=torch.long))


def before(net: nn.Module, x: Tensor, gain: float) -> Tensor:
    with torch.no_grad():
        scores = net(x)
    with torch.inference_mode():
        return votes(scores, gain).sum()


@torch.inference_mode()
def decorated(net: nn.Module, x: Tensor, gain: float) -> Tensor:
    return votes(net(x), gain).sum()


@pytest.mark.parametrize("evaluate", [behind, before, decorated])
@pytest.mark.parametrize("gain", [1000.0, 1.0])
def test_read_on_the_other_side(
    evaluate: Callable[[nn.Module, Tensor, float], Tensor], gain: float, guard: Guard
) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net, x = nn.Linear(4, 3), torch.randn(8, 4)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
            print(evaluate(net, x, gain).item())

    run = guard(body)
    assert run.faults == 0, run.stderr
    found = [(i.cause, i.step, i.mode, i.op, i.location.code) for i in run.report.incidents]
    line = "weights = torch.exp(scores.abs() * gain)  # made"
    assert found == ([("overflow", 1, "eval", "aten.exp.default", line)] if gain > 1 else [])
