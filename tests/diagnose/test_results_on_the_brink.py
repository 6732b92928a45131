"""A fix in evaluation that leaves a huge number cures that call and not the next one: a replay ends at the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Flow(nn.Module):
    """Couplings, run backwards by a loop outside the module's forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.nets = nn.ModuleList([nn.Linear(1, 2) for _ in range(4)])
        for net in self.nets:
            nn.init.constant_(net.weight, 1.0)

    def sample(self, z: Tensor, bound: float) -> Tensor:
        for number, net in enumerate(self.nets):
            a, b = (z[:, :1], z[:, 1:]) if number % 2 else (z[:, 1:], z[:, :1])
            s, t = net(a).chunk(2, 1)
            b = (b - t) * torch.exp(s.clamp(max=bound))
            z = torch.cat([a, b], 1) if number % 2 else torch.cat([b, a], 1)
        return z


def sampled(bound: float) -> Tensor:
    flow = Flow().eval()
    with torch.no_grad():
        z = flow.sample(torch.full((4, 2), 100.0), bound)
        return flow.nets[0](z[:, :1])


def test_the_bound_that_is_printed_cures_all_that_follows(guard: Guard) -> None:
    incident = guard(lambda: sampled(float("inf"))).report.incidents[0]
    assert (incident.cause, incident.mode) == ("overflow", "eval")
    (fix,) = incident.fixes
    assert fix.verified
    assert "clamp(max=10)" in fix.how
    assert not sampled(80.0).isfinite().all()
    assert sampled(10.0).isfinite().all()


def test_what_may_overflow_again_is_not_called_verified(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)).eval()
        with torch.no_grad():
            x = (model[0](torch.ones(3, 2)) * 1e7) ** 8
            model[1](x)

    incident = guard(body).report.incidents[0]
    assert (incident.cause, incident.mode) == ("overflow", "eval")
    fix = incident.fixes[0]
    assert fix.verified is None
    assert fix.outcome is not None
    assert "may overflow again" in fix.outcome
