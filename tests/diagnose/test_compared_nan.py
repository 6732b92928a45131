"""A loss that leaves out what is NaN because each comparison with it is false: mining, thresholds. A fix gives it that part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, seed_everything

Guard = Callable[..., Watched]


def mined(distances: Tensor) -> Tensor:
    """The mean of those beyond a margin."""
    return distances[distances > 0.2].mean()


def masked(distances: Tensor, is_kept: Tensor) -> Tensor:
    return torch.where(is_kept, distances, 0.0).mean()


@pytest.mark.parametrize("compares", [True, False])
def test_a_fix_may_change_a_loss_that_has_compared_nan(compares: bool, guard: Guard) -> None:
    """The other loss masks by what is no NaN: there a fix has to leave it as it was."""
    seed_everything()
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def body() -> None:
        for step in range(5):
            x = torch.rand(8, 4) + 0.1
            if step == 2:
                x[5] = 0.0
            scaled = net(x) * x[:, :1]
            unit = scaled / scaled.norm(dim=1, keepdim=True)
            distances = (unit - 1.0).square().sum(1)
            loss = mined(distances) if compares else masked(distances, x[:, 0] > 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step) == ("singular-gradient", 2)
    outcomes = [fix.outcome or "" for fix in first.fixes if fix.verified]
    assert outcomes
    assert all(("comparisons with NaN left a part of it out" in outcome) == compares for outcome in outcomes)
