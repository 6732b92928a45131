"""A fix in evaluation that leaves a huge number cures that call and not the next one: a replay ends at the call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ampguard

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


def test_what_may_overflow_again_is_bounded_tightly(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)).eval()
        with torch.no_grad():
            x = (model[0](torch.ones(3, 2)) * 1e7) ** 8
            model[1](x)

    incident = guard(body).report.incidents[0]
    assert (incident.cause, incident.mode) == ("overflow", "eval")
    fix = incident.fixes[0]
    assert fix.verified
    assert "clamp(min=-5, max=5)" in fix.how  # a power of 8 is an ordinary number then


class Encoder(nn.Module):
    """A scale of its own for each sample, as the exponential of a layer; `bound`: the largest exponent."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.log_scale, self.bound = nn.Linear(2, 1), bound
        nn.init.constant_(self.log_scale.weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.log_scale(x).clamp(max=self.bound))


def fitted(bound: float) -> Tensor:
    """Refuses what is not finite, as the distributions of probabilistic libraries do, before there is a loss."""
    scale = Encoder(bound)(torch.tensor([[500.0, 400.0], [0.1, 0.2]]))
    if not scale.isfinite().all():
        raise ValueError("Expected parameter scale to satisfy the constraint GreaterThan(lower_bound=0.0)")
    loss = torch.distributions.StudentT(4.0, 0.0, 1.0).log_prob(scale * 3).mean()
    loss.backward()
    return loss


def test_the_bound_cures_what_an_exception_has_cut_off(tmp_path: Path) -> None:
    with contextlib.suppress(ValueError), ampguard.watch(out=tmp_path / "run") as session:
        fitted(float("inf"))
    assert session.report is not None
    incident = session.report.incidents[0]
    assert (incident.cause, incident.mode) == ("overflow", "train")
    (fix,) = incident.fixes
    assert fix.verified
    assert "clamp(max=10)" in fix.how
    assert not fitted(80.0).isfinite()
    assert fitted(10.0).isfinite()
