"""A generator's step that failed is made again although the discriminator has stepped since the iteration began."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from override_loops import weights
from torch import Tensor, nn

STEPS = 8
BRIGHT = 4
"""The step whose pictures are so bright that squared differences of features do not fit float16."""


class Critic(nn.Module):
    """A score, and the features that it is made from."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2))
        self.score = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.features(x)
        return self.score(found), found


def match_in_float16(fake: Tensor, real: Tensor) -> Tensor:
    return torch.log1p(((fake - real) ** 2).mean())


def match_in_float32(fake: Tensor, real: Tensor) -> Tensor:
    return torch.log1p(((fake.float() - real.float()) ** 2).mean())


def gan(
    match: Callable[[Tensor, Tensor], Tensor], reuses: bool = False, keeps_graph: bool = False
) -> tuple[nn.Module, list[float]]:
    """Feature matching. `reuses`: the features of real pictures are those of the critic's own step, before its update.

    `keeps_graph`: those of the fake ones too, with their graph, which goes through casts of weights that have changed since.
    """
    torch.manual_seed(5)
    generator, critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), Critic()
    of_generator = torch.optim.SGD(generator.parameters(), 1e-2)
    of_critic = torch.optim.SGD(critic.parameters(), 1e-4)
    losses = []
    for step in range(STEPS):
        real = torch.randn(16, 2) * (6000.0 if step == BRIGHT else 1.0)
        with torch.autocast("cpu", dtype=torch.float16):
            fake = generator(torch.randn(16, 4))
            score_real, of_real = critic(real)
            score_fake, of_fake = critic(fake if keeps_graph else fake.detach())
            loss = torch.relu(1 - score_real.float()).mean() + torch.relu(1 + score_fake.float()).mean()
        of_critic.zero_grad()
        loss.backward(retain_graph=keeps_graph)
        of_critic.step()
        with torch.autocast("cpu", dtype=torch.float16):
            if not keeps_graph:
                of_fake = critic(fake)[1]
            of_real = of_real.detach() if reuses else critic(real)[1].detach()
            loss = match(of_fake, of_real)
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
        losses.append(loss.item())
    return nn.ModuleList([generator, critic]), losses


@pytest.mark.parametrize("reuses", [False, True])
def test_the_generators_step_is_made_again(overridden: Callable[..., Any], reuses: bool) -> None:
    by_hand, losses_by_hand = gan(match_in_float32, reuses)
    with overridden(on_nonfinite="heal") as session:
        healed, losses = gan(match_in_float16, reuses)
    run = session.report.run
    assert [fix["action"] for fix in run["healed"]] == ["force-fp32"]
    assert run["could_not"] == []
    assert (run["steps_made_again"], run["steps_held_off"]) == ([BRIGHT], 0)
    assert all(map(math.isfinite, losses))
    assert losses == pytest.approx(losses_by_hand, rel=2e-2)
    for a, b in zip(weights(healed), weights(by_hand), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


def test_no_larger_fix_is_applied_where_the_step_cannot_be_made_again(overridden: Callable[..., Any]) -> None:
    """What cannot be run again cannot tell a larger fix from the smallest."""
    with overridden(on_nonfinite="heal") as session:
        gan(match_in_float16, reuses=True, keeps_graph=True)
    run = session.report.run
    assert [fix["action"] for fix in run["healed"]] == ["force-fp32"]
    assert run["steps_made_again"] == []
    assert len(run["could_not"]) == 1
    assert "could not be made again" in run["could_not"][0]
