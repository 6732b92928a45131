"""How long an investigation may keep the other ranks waiting, or a crowded machine the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from watching import Watched

from ampguard import compat
from ampguard.diagnose import budget, investigate, terms
from ampguard.diagnose.budget import Budget
from ampguard.diagnose.cases import examiner
from ampguard.diagnose.gradients import GradientEvidence

Guard = Callable[..., Watched]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The scheduler's statistics: none, as on a machine that has none."""
    monkeypatch.setattr(budget, "SCHEDULER", tmp_path / "schedstat")
    return tmp_path / "schedstat"


@pytest.fixture(autouse=True)
def _alone(scheduler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "collective_timeout", lambda: None)


def seconds(step_seconds: float) -> float:
    now = time.perf_counter()
    return Budget.for_step(step_seconds, now).deadline - now


def test_alone_it_is_22_steps() -> None:
    assert seconds(60.0) == pytest.approx(1320.0)
    assert seconds(0.01) == pytest.approx(2.5)


def test_with_others_at_most_a_fifth_of_what_their_collectives_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "collective_timeout", lambda: 600.0)
    assert seconds(60.0) == pytest.approx(120.0)
    assert seconds(0.01) == pytest.approx(2.5)


@pytest.mark.parametrize(("statistics", "least"), [
    ("4000000 0 9", 2.5),
    ("4000000 4000000 9", 5.0),
    ("4000000 400000000 9", 10.0),
    ("0 0 0", 2.5),
    ("", 2.5),
    ("unknown", 2.5),
])  # fmt: skip
def test_where_others_use_the_processors_too_it_is_longer(scheduler: Path, statistics: str, least: float) -> None:
    scheduler.write_text(statistics)
    assert seconds(0.01) == pytest.approx(least)
    assert seconds(60.0) == pytest.approx(1320.0), "how long a step takes is measured on the same machine"


def test_a_slow_first_step_lends_a_quick_failing_one_no_time(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step loads libraries: what it takes says nothing of the one that fails."""
    asked: list[float] = []
    for_step = Budget.for_step
    monkeypatch.setattr(
        examiner.Budget, "for_step", staticmethod(lambda step, *more: (asked.append(step), for_step(step, *more))[1])
    )

    def body() -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            if step == 0:
                time.sleep(1.0)
            loss = model(torch.randn(2, 4)).square().mean() / (1 - step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert guard(body).first.cause == "division-by-zero"
    assert asked[0] >= 1.0, "where it fails is looked for in any case"
    assert asked[-1] < 0.5


def test_a_fix_is_tried_before_the_terms_of_the_loss_are(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """What differentiates each term takes all the time that there is: which of them is bad can be said without it."""
    lasting: list[int] = []

    def until_it_is_spent(evidence: GradientEvidence, budget: Budget) -> list[terms.Term]:
        lasting.append(len(terms.terms_of(evidence, budget)))
        time.sleep(max(0.0, budget.deadline - time.perf_counter()) + 0.01)
        return terms.terms_of(evidence, budget)

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            out = model(torch.randn(2, 4))
            affinity = (out * (step < 2)).square().sum().sqrt()
            optimizer.zero_grad()
            (out.square().mean() + 0.1 * affinity).backward()
            optimizer.step()

    monkeypatch.setattr(investigate, "terms_of", until_it_is_spent)
    incident = guard(body).first
    assert incident.cause == "singular-gradient"
    assert incident.fixes[0].verified
    assert lasting == [2]
    assert "terms of the loss" not in incident.explanation
