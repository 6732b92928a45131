"""Parameters that are frozen in the middle of a run while their optimizer is stepped on: by mistake, or on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def adversarial(unfreezes: bool) -> Callable[[], None]:
    """The critic is frozen for the generator's loss; the fakes of its own loss are not detached."""

    def body() -> None:
        torch.manual_seed(0)
        maker, critic = network(3, 2), network(2, 1)
        of_maker = torch.optim.Adam(maker.parameters())
        of_critic = torch.optim.Adam(critic.parameters())
        for _ in range(12):
            if unfreezes:
                critic.requires_grad_(True)
            of_critic.zero_grad()
            fake = maker(torch.randn(16, 3))
            (F.softplus(critic(fake)).mean() + F.softplus(-critic(torch.randn(16, 2))).mean()).backward()
            of_critic.step()
            critic.requires_grad_(False)
            of_maker.zero_grad()
            F.softplus(-critic(maker(torch.randn(16, 3)))).mean().backward()
            of_maker.step()

    return body


def test_a_critic_that_is_never_unfrozen(guard: Guard) -> None:
    run = guard(adversarial(unfreezes=False))

    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.severity) == ("no-gradients", 1, "warning")
    assert incident.location.code == "of_critic.step()"
    assert incident.evidence["why"] == "frozen"
    assert "of_critic" in incident.fixes[0].how


def test_one_that_is_unfrozen_is_silent(guard: Guard) -> None:
    run = guard(adversarial(unfreezes=True))
    assert (run.faults, run.report.incidents) == (0, ())


def test_a_backbone_that_is_frozen_on_purpose_is_silent(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        backbone, head = network(4, 4), network(4, 2)
        of_backbone = torch.optim.Adam(backbone.parameters())
        of_head = torch.optim.Adam(head.parameters())
        for epoch in range(4):
            backbone.requires_grad_(epoch < 1)
            for _ in range(5):
                of_backbone.zero_grad()
                of_head.zero_grad()
                F.cross_entropy(head(backbone(torch.randn(16, 4))), torch.randint(0, 2, (16,))).backward()
                of_backbone.step()
                of_head.step()

    run = guard(body)
    assert (run.faults, run.report.incidents) == (0, ())
