"""A loss divided by a Python number that is 0: the fix is a line of code, and it is tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
BAD = 3


def mean_of_kept(errors: Tensor, n: int) -> Tensor:
    return errors.sum() / n


def in_place(errors: Tensor, n: int) -> Tensor:
    total = errors.sum()
    total /= float(n)
    return total


def by_a_method(errors: Tensor, n: int) -> Tensor:
    return errors.sum().div(n) * 2 / 3


def of_something(errors: Tensor, n: int) -> Tensor:
    return (errors.sum() + 1) / (n * 2)


def of_weights(errors: Tensor, n: int) -> Tensor:
    return errors.sum() / (n * 0.125)


def by_weights_in_a_method(errors: Tensor, n: int) -> Tensor:
    return errors.sum().div(n * 0.125 if n > 1 else 0.0)


def by_a_temperature(errors: Tensor, n: int) -> Tensor:
    return torch.logsumexp((errors + 1) / (n * 0.5), 0)


CASES = {
    mean_of_kept: ("guard-empty", "return errors.sum() / max(n, 1)"),
    in_place: ("guard-empty", "total /= float(n) or 1"),
    by_a_method: ("guard-empty", "return errors.sum().div(max(n, 1)) * 2 / 3"),
    of_something: ("guard-empty", "return (errors.sum() + 1) / max(n * 2, 1)"),
    of_weights: ("guard-empty", "return errors.sum() / (n * 0.125 or 1)"),
    by_weights_in_a_method: ("guard-empty", "return errors.sum().div((n * 0.125 if n > 1 else 0.0) or 1)"),
    by_a_temperature: ("clamp", "return torch.logsumexp((errors + 1) / max(n * 0.5, 1e-6), 0)"),
}


@pytest.mark.parametrize("loss_of", CASES, ids=lambda f: f.__name__)
def test_the_divisor_is_kept_from_0(loss_of: Callable[[Tensor, int], Tensor], guard: Guard) -> None:
    def body() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(5):
            kept = torch.ones(6) * (step != BAD)
            errors = net(torch.randn(6, 4)).square().squeeze(-1) * kept
            loss = loss_of(errors, int(kept.sum()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    incident = guard(body).first
    action, how = CASES[loss_of]
    assert (incident.cause, incident.step) == ("division-by-zero", BAD)
    assert [(fix.action, fix.how, fix.verified) for fix in incident.fixes] == [(action, how, True)]
