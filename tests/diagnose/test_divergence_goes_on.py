"""Weights that have diverged overflow wherever they are used: that is told once, until the losses have come down again."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, seed_everything

from ampguard.capture.record import BadResult
from ampguard.diagnose.cases import examiner, further
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.locate import finding_place

Guard = Callable[..., Watched]


class TwoPaths(nn.Module):
    """Batches go through one layer or another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.left = nn.Linear(64, 64)
        self.right = nn.Linear(64, 64)
        self.last = nn.Linear(64, 4)

    def forward(self, x: Tensor, goes_left: bool) -> Tensor:
        h = torch.relu(self.first(x))
        h = torch.relu(self.left(h) if goes_left else self.right(h))
        return self.last(h)


class Training:
    def __init__(self) -> None:
        seed_everything()
        self.model = TwoPaths()
        self.good = copy.deepcopy(self.model.state_dict())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=4.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=10**6)
        self.steps = 0

    def go(self, steps: int, factor: float = 1.0) -> None:
        for _ in range(steps):
            x, y = torch.randn(32, 16) * factor, torch.randn(32, 4)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(self.model(x, self.steps % 3 != 0).float(), y)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.steps += 1


def test_failures_of_the_same_weights_elsewhere_are_the_same_story(guard: Guard) -> None:
    run = guard(lambda: Training().go(40))
    assert [i.cause for i in run.report.incidents if i.severity == "error"] == ["divergence"]
    assert run.first.occurrences > 20


def test_an_overflow_after_the_losses_have_come_down_is_another_one(guard: Guard) -> None:
    def body() -> None:
        training = Training()
        training.go(20)
        training.model.load_state_dict(training.good)
        training.optimizer.param_groups[0]["lr"] = 1e-3
        training.go(20)
        training.go(1, factor=1e6)
        training.go(3)

    run = guard(body)
    assert [(i.cause, i.step) for i in run.report.incidents if i.severity == "error"][1:] == [("fp16-overflow", 40)]
    assert run.first.cause == "divergence"


def test_fixes_of_one_step_are_not_tried_for_its_ends(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    explained: list[Evidence] = []
    explain = examiner.explain
    monkeypatch.setattr(
        examiner, "explain", lambda evidence, *more: (explained.append(evidence), explain(evidence, *more))[1]
    )
    run = guard(lambda: Training().go(40))
    assert run.first.cause == "divergence"
    assert not explained, {(e.op.name, e.op.module) for e in explained}


def test_once_it_has_taken_its_time_no_further_end_is_run_again(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    located: list[BadResult] = []
    locate = finding_place.locate
    monkeypatch.setattr(finding_place, "locate", lambda bad, *more: (located.append(bad), locate(bad, *more))[1])
    monkeypatch.setattr(examiner, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(further, "TIME_SHARE", 0.0)

    def body() -> None:
        training = Training()
        training.go(40)
        training.model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            for i in range(12):
                F.mse_loss(training.model(torch.randn(32, 16), i % 3 != 0), torch.randn(32, 4)).item()

    run = guard(body)
    assert [i.cause for i in run.report.incidents if i.severity == "error"] == ["divergence"]
    assert run.first.occurrences > 40
    assert [bad.mode for bad in located].count("train") < 8
    assert [bad.mode for bad in located].count("eval") == 1
