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


def train(is_scaled: bool, forgets_from: int = 60, passes_by_at: int = 60, steps: int = 60) -> None:
    """From step `forgets_from` on the critic's gradients are not cleared any more; in `passes_by_at` it is stepped directly."""
    seed_everything()
    maker, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    of_maker, of_critic = (torch.optim.SGD(net.parameters(), lr=1e-3) for net in (maker, critic))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=25, enabled=is_scaled)
    for step in range(steps):
        with torch.autocast("cpu", dtype=torch.float16, enabled=is_scaled):
            false = maker(torch.randn(16, 4))
            told = F.softplus(-critic(torch.randn(16, 8))).mean() + F.softplus(critic(false.detach())).mean()
        if step < forgets_from:
            of_critic.zero_grad()
        scaler.scale(told).backward()
        if step == passes_by_at:
            of_critic.step()
        else:
            scaler.step(of_critic)
        with torch.autocast("cpu", dtype=torch.float16, enabled=is_scaled):
            fooled = F.softplus(-critic(false)).mean()
        of_maker.zero_grad()
        scaler.scale(fooled).backward()
        scaler.step(of_maker)
        scaler.update()


@pytest.mark.parametrize("is_scaled", [False, True])
def test_it_is_on_in_most_iterations(is_scaled: bool, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    original = Routine.iteration_ended

    def noted(self: Routine, may_rest: bool) -> None:
        original(self, may_rest)
        begun.append(self.is_on)

    monkeypatch.setattr(Routine, "iteration_ended", noted)
    assert guard(lambda: train(is_scaled)).report.incidents == ()
    assert any(begun)
    assert len(begun) < 40  # else each of the 60 had been fed to the machine in full


@pytest.mark.parametrize("is_scaled", [False, True])
def test_what_is_forgotten_later_is_told(is_scaled: bool, guard: Guard) -> None:
    incident = guard(lambda: train(is_scaled, forgets_from=40, steps=48)).first
    assert (incident.cause, incident.step) == ("missing-zero-grad", 40)
    assert "of_critic" in incident.explanation


def test_a_step_past_the_scaler_is_told(guard: Guard) -> None:
    incident = guard(lambda: train(True, passes_by_at=40)).first
    assert (incident.cause, incident.step) == ("bypassed-scaler", 40)
