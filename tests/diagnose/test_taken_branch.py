"""Both values that `torch.where` chooses from are NaN at the same place: the one that it takes is to blame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import seed_everything

Guard = Callable[..., Any]


class Choice(nn.Module):
    def __init__(self, takes_first: bool) -> None:
        super().__init__()
        self.inner, self.takes_first = nn.Linear(4, 4, bias=False), takes_first

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        unit = h / h.abs().sum(1, keepdim=True)
        mean = h / (h * h).mean(1, keepdim=True)
        first = (x == 0) == self.takes_first
        return torch.where(first, unit, mean)


@pytest.mark.parametrize("takes_first", [True, False])
def test_line_of_what_was_taken(takes_first: bool, guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        net = Choice(takes_first)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(3):
            x = torch.randn(5, 4)
            x[1] *= step != 2
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step) == ("division-by-zero", 2)
    assert first.location.code.strip().startswith("unit =" if takes_first else "mean =")


def test_custom_backward(guard: Guard) -> None:
    class Pinball(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, error: Tensor, width: float) -> Tensor:
            ctx.save_for_backward(error)
            ctx.width = width
            return error.abs()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            (error,) = ctx.saved_tensors
            size = error.abs()
            slope = torch.where(size < ctx.width, error / ctx.width, error / size)
            return grads[0] * slope, None

    def body() -> None:
        seed_everything()
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(3):
            out = net(torch.randn(5, 4))
            target = torch.randn(5, 1)
            target[1] = out[1].detach() if step == 2 else 0
            loss = Pinball.apply(out - target, 0.0).mean()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step) == ("singular-gradient", 2)
    assert "slope" in first.location.code
    assert first.fixes[0].verified
