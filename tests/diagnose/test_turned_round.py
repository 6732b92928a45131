"""A log-probability of -Inf that was meant, in a difference: the ratio of probabilities is infinite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
BAD = 3


def trained(is_bad: bool = True) -> list[Any]:
    """Importance ratios over actions, one of which the old policy forbade although it was taken."""
    torch.manual_seed(0)
    policy = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    for step in range(6):
        x, gain = torch.randn(8, 4), torch.randn(8).abs() * -1.0
        legal = torch.ones(8, 3, dtype=torch.bool)
        with torch.no_grad():
            action = policy(x).argmax(1, keepdim=True)
            taken = torch.eye(3, dtype=torch.bool)[action[5, 0]]
            legal[5] = ~taken if step == BAD and is_bad else taken
            old = policy(x).masked_fill(~legal, float("-inf")).log_softmax(-1)
            before: Tensor = old.gather(1, action)
        now = policy(x).log_softmax(-1).gather(1, action)
        ratio = torch.exp(now - before)[:, 0]
        loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [p.tolist() for p in policy.parameters()]


def test_the_difference_and_a_bound_for_it(guard: Guard) -> None:
    run = guard(trained)
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.op) == ("indeterminate", BAD, "aten.sub.Tensor")
    assert "made by masked_fill" in incident.explanation
    (fix,) = incident.fixes
    assert (fix.action, fix.verified) == ("clamp", True)
    assert fix.how == "ratio = torch.exp((now - before).clamp(max=20))[:, 0]"


def test_forbidden_actions_that_are_not_taken(guard: Guard) -> None:
    plain = trained(is_bad=False)
    run = guard(lambda: trained(is_bad=False))
    assert run.result == plain
    assert not run.report.incidents
