"""A teacher without gradients in the middle of a training step: late in a long run its loss is explained as early ones are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import fingerprint, seed_everything

from ampguard.capture.glue import schedule
from ampguard.capture.root_calls import pace

Guard = Callable[..., Any]
STEPS = 60
BAD = 50


def network() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))


def distil(bad_loss: Callable[[Tensor, Tensor], Tensor], skips: bool) -> dict[str, Any]:
    """A momentum encoder: its weights and its outputs are computed between the student's call and the loss."""
    seed_everything()
    student = network()
    teacher = copy.deepcopy(student)
    optimizer = torch.optim.SGD(student.parameters(), 0.01)
    for step in range(STEPS):
        x = torch.randn(4, 8)
        out = student(x)
        with torch.no_grad():
            for mean, weight in zip(teacher.parameters(), student.parameters(), strict=True):
                mean.data.mul_(0.99).add_(weight.data, alpha=0.01)
            target = teacher(x)
        margin = (out - target).square().mean() - (2.0 if step == BAD else -1.0)
        loss = bad_loss(margin, out)
        optimizer.zero_grad()
        if skips and not torch.isfinite(loss):
            continue
        loss.backward()
        optimizer.step()
    return fingerprint(student, teacher, optimizer)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("are_free_seconds_over", [False, True])
def test_the_loss_behind_a_teacher_is_explained(
    are_free_seconds_over: bool, skips: bool, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad_loss(margin: Tensor, out: Tensor) -> Tensor:
        return margin.log() + out.square().mean()

    if are_free_seconds_over:
        monkeypatch.setattr(pace, "FREE_SECONDS", 0.0)
        monkeypatch.setattr(schedule, "FREE_SECONDS", 0.0)
        monkeypatch.setattr(
            schedule, "GLUE_TIME_SHARE", 1.0
        )  # (how many operators 1 % of a step is varies with the machine)
    unguarded = distil(bad_loss, skips)
    run = guard(lambda: distil(bad_loss, skips))
    assert run.faults == 0, run.stderr
    assert run.result == unguarded
    incident = run.first
    assert (incident.cause, incident.step, incident.op) == ("domain-error", BAD, "aten.log.default")
    assert incident.location.code == "return margin.log() + out.square().mean()"


def test_a_teachers_calls_rest_no_sooner_than_they_cost(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a training step computes between two of them is not theirs, and a call kept as one is one event."""
    spent: list[float] = []
    leave = pace.Pace.leave

    def note(self: pace.Pace, *args: Any) -> None:
        leave(self, *args)
        spent.append(self.spent)

    monkeypatch.setattr(pace.Pace, "leave", note)
    monkeypatch.setattr(pace, "TAPED_OP_SECONDS", 1.0)  # nothing else takes as long
    run = guard(lambda: distil(lambda margin, out: out.square().mean(), skips=False))
    assert run.faults == 0, run.stderr
    assert len(spent) == STEPS
    assert spent[-1] < 1.0


@pytest.mark.parametrize("at", [3, 40])
def test_a_bad_figure_between_a_loss_and_its_backward_is_told(at: int, guard: Guard) -> None:
    """An evaluation that is read there is not on the way to the loss."""

    def body() -> None:
        seed_everything()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(STEPS):
            x = torch.randn(4, 8)
            loss = model(x).square().mean()
            with torch.no_grad():
                scores = model(x * (1e38 if step == at else 1.0)).exp()
                (scores / scores.sum(1, keepdim=True)).mean().item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    incident = guard(body).first
    assert (incident.cause, incident.mode, incident.step) == ("overflow", "eval", at)
