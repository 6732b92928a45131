"""A negative power of what is negative: next to 0 the clamped result would be larger than all others by far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Normalised(nn.Module):
    """A graph convolution: weights of edges can be negative, and so can their sum at a node."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 1)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        degree = adjacency.sum(1)
        scale = degree.pow(-0.5)
        return (scale[:, None] * adjacency * scale) @ self.mix(x)


def test_the_bound_lies_just_below_the_other_values(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = Normalised()
        adjacency = torch.eye(4) * 3 + torch.rand(4, 4)
        adjacency[2] *= -1
        model(torch.randn(4, 3), adjacency).square().mean().backward()

    first = guard(body).first
    assert (first.cause, first.op) == ("domain-error", "aten.pow.Tensor_Scalar")
    fix = first.fixes[0]
    assert (fix.how, fix.verified) == ("scale = degree.clamp(min=1).pow(-0.5)", True)
    assert float(fix.outcome.rpartition(" ")[2]) < 1e3
