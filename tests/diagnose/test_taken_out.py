"""Bad numbers that leave the tensors and come back in new ones: what a replay can show of a fix, and what it cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, seed_everything

Guard = Callable[..., Watched]

pytestmark = pytest.mark.filterwarnings("ignore:std\\(\\):UserWarning")


def actor_critic(other_trouble: bool) -> None:
    """As in PyTorch's own example: the returns are normalised, and each goes into a new tensor."""
    seed_everything()
    body, policy, critic = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)
    model = nn.ModuleList([body, policy, critic])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    features = body(torch.randn(4)).relu()
    chosen, value = policy(features).log_softmax(0)[0], critic(features)
    returns = torch.rand(1)
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    terms = [-chosen * r + F.smooth_l1_loss(value, torch.tensor([r])) for r in returns]
    loss = torch.stack(terms).sum()
    if other_trouble:
        loss = loss + (value * 0 - 1).log().sum()
    optimizer.zero_grad()
    loss.backward()


def test_fix_that_a_replay_cannot_follow_is_not_told_as_not_enough(guard: Guard) -> None:
    run = guard(lambda: actor_critic(other_trouble=False))
    assert run.first.cause == "empty-reduction"
    (fix,) = [fix for fix in run.first.fixes if fix.action == "guard-empty"]
    assert fix.verified is None
    assert fix.outcome is not None
    assert "a number that the script had taken out of its tensors" in fix.outcome
    assert "torch.tensor([r])" in fix.outcome


def test_fix_that_is_not_enough_for_another_reason_is_told_with_what_it_needs(guard: Guard) -> None:
    run = guard(lambda: actor_critic(other_trouble=True))
    assert run.first.cause == "empty-reduction"
    (fix,) = [fix for fix in run.first.fixes if fix.action == "guard-empty"]
    assert fix.verified
    assert "correction=0" in fix.how
    assert "(value * 0 - 1).clamp(min=1e-6).log()" in fix.how
