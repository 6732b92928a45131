"""Scores of -Inf in a parameter forbid what they belong to (a CRF's transitions): where a row has nothing else, the derivative
is NaN, and the weight is not what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Crf(nn.Module):
    """The forward algorithm; no tag is left for the good of `start` and `end`."""

    def __init__(self, tags: int, is_start_cut_off: bool) -> None:
        super().__init__()
        self.emissions = nn.Linear(8, tags)
        self.transitions = nn.Parameter(torch.randn(tags, tags) * 0.1)
        with torch.no_grad():
            self.transitions[0, 0 if is_start_cut_off else 1 :] = -torch.inf

    def forward(self, x: Tensor) -> Tensor:
        scores = self.emissions(x)
        alpha = scores[:, 0]
        for t in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha[:, None] + self.transitions + scores[:, t, :, None], 2)
        return torch.logsumexp(alpha, 1)


def trained(is_start_cut_off: bool) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        model = Crf(5, is_start_cut_off)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 6, 8)).mean().backward()
            optimizer.step()

    return body


def test_a_row_of_nothing_else_has_no_derivative(guard: Guard) -> None:
    first = guard(trained(is_start_cut_off=True)).first
    assert (first.cause, first.step, first.phase) == ("singular-gradient", 0, "backward")
    assert "torch.logsumexp(alpha[:, None]" in first.location.code
    assert first.fixes[0].verified


def test_a_row_with_one_left_is_healthy(guard: Guard) -> None:
    assert not guard(trained(is_start_cut_off=False)).report.incidents
