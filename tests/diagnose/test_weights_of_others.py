"""A loss that fails by a number that the networks of other optimizers gave: not by its own weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ampguard.diagnose.dynamics.situations import Situations

Guard = Callable[..., Any]


def actor_and_critic(of_own: bool, steps: int = 60) -> None:
    """Advantage-weighted regression: samples weigh as much as the exponential of what the critic says of them, which grows.
    `of_own`: or of what the actor itself says."""
    torch.manual_seed(0)
    critic, actor = nn.Linear(4, 1), nn.Linear(4, 2)
    nn.init.constant_(critic.weight, 5.0)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    of_actor = torch.optim.Adam(actor.parameters(), lr=3e-2)
    for _ in range(steps):
        states, actions = torch.randn(64, 4).abs(), torch.randn(64, 2)
        value_loss = nn.functional.l1_loss(critic(states).squeeze(1), 40 * states.sum(1))
        of_critic.zero_grad()
        value_loss.backward()
        of_critic.step()

        with torch.no_grad():
            advantage = critic(states).squeeze(1) - 5 * states.sum(1)
        out = actor(states)
        weight = torch.exp(400 * out[:, 0] if of_own else 12 * advantage)
        loss = (weight * (out - actions).square().sum(1)).mean()
        of_actor.zero_grad()
        loss.backward()
        of_actor.step()


@pytest.mark.parametrize("of_own", [False, True])
def test_it_is_no_divergence_of_them(guard: Guard, of_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    asked = Situations.of

    def of(self: Situations, *args: Any) -> Any:
        situation = asked(self, *args)
        seen.append(situation.rests_on_others)
        return situation

    monkeypatch.setattr(Situations, "of", of)
    run = guard(lambda: actor_and_critic(of_own))
    assert run.faults == 0, run.stderr
    assert run.first.cause == "overflow", run.stderr
    assert "torch.exp(" in run.first.location.code
    assert seen[0] is not of_own
