"""Where a divisor is a root of 0, an epsilon beside the root leaves gradients of NaN: only one under it is a fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import seed_everything

Guard = Callable[..., Any]


class Spread(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        c = x - x.mean(1, keepdim=True)
        return c / c.square().mean(1, keepdim=True).sqrt()


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x - x[:, :1]
        return x / x.abs().sum(1, keepdim=True)


def loop(last: nn.Module) -> Callable[[], None]:
    def body() -> None:
        seed_everything()
        net = nn.Sequential(nn.Linear(4, 6, bias=False), last)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(4):
            x = torch.randn(5, 4)
            if step == 3:
                x[1] = 0
            loss = (net(x) * torch.arange(6)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return body


def test_only_an_epsilon_under_the_root_is_verified(guard: Guard) -> None:
    fixes = guard(loop(Spread())).first.fixes
    assert fixes[0].verified
    assert fixes[0].how == "return c / (c.square().mean(1, keepdim=True) + 1e-12).sqrt()"
    assert [fix.verified for fix in fixes[1:]] == [False, False]
    assert all(fix.outcome is not None and fix.outcome.endswith("its gradients are not") for fix in fixes[1:])


@pytest.mark.parametrize("printed", ["(c.square().mean(1, keepdim=True) + 1e-12).sqrt()"])
def test_what_is_printed_trains(printed: str) -> None:
    """The truth, by PyTorch alone."""

    def gradient_of(code: str) -> Tensor:
        c = torch.zeros(1, 3, requires_grad=True)
        (c / eval(code, {"c": c})).sum().backward()
        assert c.grad is not None
        return c.grad

    assert gradient_of(printed).isfinite().all()
    assert gradient_of("c.square().mean(1, keepdim=True).sqrt() + 1e-6").isnan().all()
    assert gradient_of("c.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)").isnan().all()


def test_a_divisor_that_is_no_root_keeps_its_fixes(guard: Guard) -> None:
    fixes = guard(loop(Total())).first.fixes
    assert [fix.verified for fix in fixes] == [True, True]
