"""A weight that begins at 0 under spectral_norm: 0/0 inside PyTorch, where nobody can add an epsilon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
WAYS = {"parametrization": nn.utils.parametrizations.spectral_norm, "hook": nn.utils.spectral_norm}


class Critic(nn.Module):
    def __init__(self, normalised: Callable[[nn.Module], nn.Module], start: float) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        head = nn.Linear(8, 3)
        nn.init.normal_(head.weight, std=start)
        self.head = normalised(head)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


def train(normalised: Callable[[nn.Module], nn.Module], start: float) -> None:
    torch.manual_seed(0)
    model = Critic(normalised, start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        loss = model(torch.randn(5, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm:FutureWarning")
@pytest.mark.parametrize("way", WAYS)
def test_the_weight_is_to_be_initialised(way: str, guard: Guard) -> None:
    incident = guard(lambda: train(WAYS[way], 0.0)).first
    assert (incident.cause, incident.step) == ("division-by-zero", 0)
    assert incident.module.startswith("head")
    assert "0 everywhere" in incident.explanation
    assert [(fix.action, fix.verified) for fix in incident.fixes] == [("initialise-parameter", True)]


def test_a_division_of_the_scripts_own_takes_an_epsilon(guard: Guard) -> None:
    def body() -> None:
        layer = nn.Linear(4, 4)
        weight = torch.zeros(4, 4, requires_grad=True)
        (layer(torch.ones(2, 4)) @ (weight / weight.norm())).sum().backward()

    assert "add-epsilon" in [fix.action for fix in guard(body).first.fixes]
