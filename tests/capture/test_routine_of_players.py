"""A critic's gradients of the generator's loss are cleared unused in every iteration: that is a routine like any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, seed_everything

from ampguard.capture.protocol.routine import Routine

Guard = Callable[..., Watched]


def train(forgets_from: int, steps: int = 60) -> None:
    """From step `forgets_from` on the critic's gradients are not cleared any more."""
    seed_everything()
    maker, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    of_maker, of_critic = (torch.optim.SGD(net.parameters(), lr=1e-3) for net in (maker, critic))
    for step in range(steps):
        false = maker(torch.randn(16, 4))
        told = F.softplus(-critic(torch.randn(16, 8))).mean() + F.softplus(critic(false.detach())).mean()
        if step < forgets_from:
            of_critic.zero_grad()
        told.backward()
        of_critic.step()
        of_maker.zero_grad()
        F.softplus(-critic(false)).mean().backward()
        of_maker.step()


def test_it_is_on_in_most_iterations(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    original = Routine.iteration_ended

    def noted(self: Routine, may_rest: bool) -> None:
        original(self, may_rest)
        begun.append(self.is_on)

    monkeypatch.setattr(Routine, "iteration_ended", noted)
    assert guard(lambda: train(forgets_from=60)).report.incidents == ()
    assert any(begun)
    assert len(begun) < 40  # else each of the 60 had been fed to the machine in full


def test_what_is_forgotten_later_is_told(guard: Guard) -> None:
    (incident,) = guard(lambda: train(forgets_from=40)).report.incidents
    assert incident.cause == "missing-zero-grad"
    assert 40 <= incident.step <= 43
    assert "of_critic" in incident.explanation
