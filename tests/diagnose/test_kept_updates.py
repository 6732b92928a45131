"""Updates below the spacing of low-precision weights that an optimizer does not lose: rounded at random, or carried along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
Rule = Callable[[Tensor, Tensor, dict[str, Tensor]], None]


def rounds(weight: Tensor, update: Tensor, state: dict[str, Tensor]) -> None:
    weight.add_(update.to(weight.dtype))


def rounds_with_momentum(weight: Tensor, update: Tensor, state: dict[str, Tensor]) -> None:
    mean = state.setdefault("mean", torch.zeros_like(weight))
    weight.add_(mean.mul_(0.9).add_(update.to(weight.dtype)))


def rounds_at_random(weight: Tensor, update: Tensor, state: dict[str, Tensor]) -> None:
    bits = (weight.float() + update).view(torch.int32)
    weight.copy_((bits + torch.randint_like(bits, 0, 1 << 16)).bitwise_and_(-65536).view(torch.float32))


def keeps_copies(weight: Tensor, update: Tensor, state: dict[str, Tensor]) -> None:
    weight.copy_(state.setdefault("copy", weight.float().clone()).add_(update))


def compensates(weight: Tensor, update: Tensor, state: dict[str, Tensor]) -> None:
    """Kahan summation; the rest is added to the next update."""
    whole = update.to(weight.dtype) + state.setdefault("rest", torch.zeros_like(weight))
    new = weight + whole
    state["rest"] = whole - (new - weight)
    weight.copy_(new)


def compensates_in_place(weight: Tensor, update: Tensor, state: dict[str, Tensor]) -> None:
    rest = state.setdefault("rest", torch.zeros_like(weight)).add_(update.to(weight.dtype))
    before = weight.clone()
    weight.add_(rest)
    rest.add_(before.sub_(weight))


class Descent(torch.optim.Optimizer):
    """Plain gradient descent by one of these rules."""

    def __init__(self, parameters: Any, lr: float, rule: Rule) -> None:
        super().__init__(parameters, {"lr": lr, "rule": rule})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                group["rule"](weight, -group["lr"] * weight.grad.float(), self.state[weight])


def train(rule: Rule) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).bfloat16()
    x, y = torch.randn(64, 32, dtype=torch.bfloat16), torch.randint(8, (64,))
    opt = Descent(net.parameters(), 1e-3, rule)
    for _ in range(64):
        opt.zero_grad()
        nn.functional.cross_entropy(net(x).float(), y).backward()
        opt.step()


@pytest.mark.parametrize("rule", [rounds_at_random, keeps_copies, compensates, compensates_in_place])
def test_kept(rule: Rule, guard: Guard) -> None:
    assert guard(lambda: train(rule)).report.incidents == ()


@pytest.mark.parametrize("rule", [rounds, rounds_with_momentum])
def test_lost(rule: Rule, guard: Guard) -> None:
    (incident,) = guard(lambda: train(rule)).report.incidents
    assert incident.cause == "lost-update"
