"""Infinities in an argument that the code consumes, until a factor of 0 makes them NaN; and holes in the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
HOPS = torch.tensor(
    [[0.0, 1.0, 2.0, float("inf")], [1.0, 0.0, 3.0, float("inf")], [2.0, 3.0, 0.0, 1.0], [4.0, 5.0, 1.0, 0.0]]
)


class Local(nn.Module):
    """Attention that decays with the distance; without a path the distance is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.locality = nn.Linear(4, 4), 1.0

    def forward(self, x: Tensor, hops: Tensor) -> Tensor:
        scores = self.mix(x) - self.locality * hops
        return (scores.softmax(-1) @ x).sum()


def annealed(last: float) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        model = Local()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(4):
            model.locality = last if step == 3 else 1.0
            model(torch.randn(4, 4), HOPS).backward()
            optimizer.step()
            optimizer.zero_grad()

    return body


def test_a_factor_that_reaches_zero_is_indeterminate(guard: Guard) -> None:
    first = guard(annealed(0.0)).first
    assert (first.cause, first.step, first.op) == ("indeterminate", 3, "aten.mul.Tensor")
    (fix,) = first.fixes
    assert (fix.action, fix.verified) == ("mask-value", True)
    expected = "hops = hops.clamp(max=1e30), before: scores = self.mix(x) - self.locality * hops"
    assert fix.how == f"keep it finite with {expected}"


def test_infinities_that_nothing_consumes_are_bad_data(guard: Guard) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x * 0.0).mean()

    def body() -> None:
        x = torch.randn(4, 4)
        x[1, 2] = float("inf")
        Scaled()(x).backward()

    assert guard(body).first.cause == "nonfinite-input"


def test_infinities_of_either_sign_are_no_mask(guard: Guard) -> None:
    """Advantages that the script has divided by 0 where nobody followed it: each of the sums' terms is infinite."""
    batches = [(torch.randn(8, 4), torch.randn(8)) for _ in range(5)]
    batches[3][1].div_(torch.zeros(()))

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for x, advantage in batches:
            optimizer.zero_grad()
            loss = (model(x).flatten() * advantage).mean()
            loss.backward()
            if torch.isfinite(loss):
                optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step, first.op) == ("nonfinite-input", 3, "aten.mul.Tensor")
    assert "`advantage`" in first.explanation
