"""Gradients that are never cleared until training diverges: one failure, and another one where clearing is not it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from watching import Watched, seed_everything

Guard = Callable[..., Watched]


class Momentum:
    """What a script may write in the place of an optimizer."""

    def __init__(self, weights: list[torch.Tensor], rate: float) -> None:
        self.weights, self.rate = weights, rate
        self.moving = [torch.zeros_like(w) for w in weights]

    def step(self) -> None:
        with torch.no_grad():
            for w, m in zip(self.weights, self.moving, strict=True):
                assert w.grad is not None
                m.mul_(0.8).add_(w.grad)
                w.sub_(self.rate * m)


def factorise(rate: float, clears: bool, by_hand: bool, steps: int = 260) -> None:
    seed_everything()
    rows, columns = (0.3 * torch.randn(20, 4)).requires_grad_(), (0.3 * torch.randn(15, 4)).requires_grad_()
    truth = torch.randn(20, 15)
    weights = [rows, columns]
    optimizer = Momentum(weights, rate) if by_hand else torch.optim.SGD(weights, lr=rate, momentum=0.8)
    for _ in range(steps):
        i, j = torch.randint(20, (32,)), torch.randint(15, (32,))
        loss = ((rows[i] * columns[j]).sum(1) - truth[i, j]).square().mean()
        loss.backward()
        optimizer.step()
        if clears:
            rows.grad = columns.grad = None


@pytest.mark.parametrize("by_hand", [True, False])
def test_what_piles_up_is_the_cause(by_hand: bool, guard: Guard) -> None:
    run = guard(lambda: factorise(0.05, clears=False, by_hand=by_hand))
    assert run.faults == 0, run.stderr
    assert run.causes == ["missing-zero-grad"]
    assert run.first.evidence["led_to"][0].startswith("divergence in step ")


def test_the_same_at_a_rate_that_is_too_high(guard: Guard) -> None:
    run = guard(lambda: factorise(5.0, clears=True, by_hand=False))
    assert run.causes == ["divergence"]


def test_another_optimizer_diverges(guard: Guard) -> None:
    """One network is trained on gradients that pile up, at a rate that it bears; another one at a rate that is far too high."""

    def body() -> None:
        seed_everything()
        calm, wild = nn.Linear(6, 1), nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
        first, second = torch.optim.SGD(calm.parameters(), lr=1e-6), torch.optim.SGD(wild.parameters(), lr=3.0)
        for _ in range(60):
            x = torch.randn(16, 6)
            calm(x).square().mean().backward()
            first.step()
            second.zero_grad()
            (wild(x) - x[:, :1]).square().mean().backward()
            second.step()

    assert sorted(guard(body).causes) == ["divergence", "missing-zero-grad"]
