"""Looks at failures that are most likely known have an allowance; what is unlike them is looked at all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, seed_everything

from ampguard.capture.record import BadResult
from ampguard.diagnose.cases import examiner, further
from ampguard.diagnose.locate import finding_place

Guard = Callable[..., Watched]


def root_of(x: Tensor) -> Tensor:
    return (-1 - x.square()).sqrt().sum()


def log_of(x: Tensor) -> Tensor:
    return (-1 - x.square()).log().sum()


def test_a_failure_that_is_unlike_the_others_is_looked_at(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    located: list[BadResult] = []
    locate = finding_place.locate
    monkeypatch.setattr(finding_place, "locate", lambda bad, *more: (located.append(bad), locate(bad, *more))[1])
    monkeypatch.setattr(examiner, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(further, "TIME_SHARE", 0.0)
    monkeypatch.setattr("ampguard.diagnose.budget.STEPS_WORTH", 0.0)

    def body() -> None:
        seed_everything()
        first, second = nn.Linear(4, 1), nn.Linear(4, 1)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-3)
        for step in range(20):
            x = torch.randn(8, 4)
            loss = root_of(first(x)) if step < 16 else log_of(second(x))
            if torch.isfinite(loss):
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()

    run = guard(body)
    assert [(i.step, i.location.function) for i in run.report.incidents] == [(0, "root_of"), (0, "log_of")]
    assert len(located) == 3
    assert run.first.occurrences == 16
