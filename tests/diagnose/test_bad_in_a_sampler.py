"""A sampler feeds what a model returns to it again: one failure, seen in each of its steps, is explained once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.replay.rebuild import Replayer

Guard = Callable[..., Any]
STEPS = 8


def sample(net: nn.Module, between: Callable[[Tensor, int], Tensor] = lambda x, k: x) -> float:
    spread = torch.linspace(0.9, 0.0, STEPS)  # 0 in the last of the schedule, which a sampler uses first
    net.eval()
    with torch.no_grad():
        x = torch.randn(4, 6)
        for k in reversed(range(STEPS)):
            x = (x - 0.1 * net(x)) / spread[k]
            x = between(x, k)
        return float(x.mean())


def train(between: Callable[[Tensor, int], Tensor] = lambda x, k: x) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(3):
        x = torch.randn(8, 6)
        optimizer.zero_grad()
        (net(x) - x).square().mean().backward()
        optimizer.step()
    sample(net, between)


def test_it_is_explained_once(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    run = Replayer.run
    monkeypatch.setattr(Replayer, "run", lambda s, *a, **k: traced.append(k.get("traced", True)) or run(s, *a, **k))
    report = guard(train).report
    (incident,) = report.incidents
    assert (incident.cause, incident.op, incident.mode) == ("division-by-zero", "aten.div.Tensor", "eval")
    assert sum(traced) == 1


def test_what_was_cleaned_in_between_may_fail_anew(guard: Guard) -> None:
    def between(x: Tensor, k: int) -> Tensor:
        return torch.log(torch.nan_to_num(x, nan=0.5, posinf=1.0, neginf=-1.0) - 1e6) if k == 3 else x

    causes = [incident.cause for incident in guard(lambda: train(between)).report.incidents]
    assert sorted(causes) == ["division-by-zero", "domain-error"]
