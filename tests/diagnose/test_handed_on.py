"""A call that hands on what it was given has made nothing bad: the data was."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watching import Watched

Guard = Callable[..., Watched]


class Policy(nn.Module):
    """Its parts are called by methods of its own, so that each is a call outside other modules."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.net = nn.Linear(4, 2)

    def act(self, observation: Tensor) -> Tensor:
        result: Tensor = self.net(self.first(observation))
        return result


@pytest.mark.parametrize("first", [nn.Flatten(), nn.Identity(), nn.Dropout()], ids=["flatten", "identity", "dropout"])
@pytest.mark.parametrize("is_read", [True, False], ids=["read further on", "not read"])
def test_bad_observation_is_told_once_and_as_data(guard: Guard, first: nn.Module, is_read: bool) -> None:
    def body() -> None:
        torch.manual_seed(0)
        random = np.random.default_rng(0)
        policy = Policy(first)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        for step in range(6):
            policy.train()
            optimizer.zero_grad()
            policy.act(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            policy.eval()
            observation = random.normal(size=(1, 4)).astype("float32")
            if step == 3:
                observation[0, 2] = np.nan
            with torch.no_grad():
                (policy.act if is_read else policy.first)(torch.as_tensor(observation))

    run = guard(body)
    assert run.faults == 0
    assert run.causes == ["nonfinite-input"]
    assert (run.first.step, run.first.mode) == (4, "eval")
    assert run.first.module == ("net" if is_read else "first")
