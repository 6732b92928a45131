"""An evaluation that feeds a model its own output: each bad result is looked up, and not all that came before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ampguard.diagnose.cases import recurrence

CALLS = 300


def rollout() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        model.weight.copy_(torch.eye(4) * 4.0)
        state, errors = torch.ones(2, 4), []
        for _ in range(CALLS):
            state = model(state)
            errors.append((state - 1.0).abs().mean())
        torch.stack(errors).mean().item()


def test_what_is_asked_of_each_bad_result_does_not_grow(
    guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = 0
    refs_of = recurrence.refs_of

    def counted(event: Any) -> Any:
        nonlocal looked_at
        looked_at += 1
        return refs_of(event)

    monkeypatch.setattr(recurrence, "refs_of", counted)

    run = guard(rollout)

    assert run.faults == 0
    assert [i.cause for i in run.report.incidents] == ["overflow"], run.stderr
    assert run.first.mode == "eval"
    assert looked_at < CALLS * 80, "without a bound it is about half of CALLS squared"
