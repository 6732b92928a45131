"""Moves of a schedule without a step of the optimizer: a note where they are next to nothing of it, a warning where not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from watching import Watched

from ampguard import compat
from ampguard.incident import Incident

Guard = Callable[..., Watched]
Make = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]

FITS = 2.0**15
"""The largest power of two that float16 holds: the gradient of the sum of a result is the loss scale itself."""


def training(make: Make, lost: int, steps: int, is_too_large: Callable[[int], bool] = lambda step: False) -> None:
    """The first `lost` steps are skipped, and those whose loss is made larger than float16 can hold."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=FITS * 2.0**lost)
    schedule = make(opt)
    for step in range(steps):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.rand(1, 4))
        loss = out.float().sum() * (4.0 if is_too_large(step) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update(FITS if step >= lost else None)
        schedule.step()


def one_cycle(length: int, share: float = 0.3) -> Make:
    return lambda opt: lr_scheduler.OneCycleLR(opt, 1e-6, total_steps=length, pct_start=share)


def warmed_up(length: int) -> Make:
    def make(opt: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        warm_up = lr_scheduler.LinearLR(opt, 0.1, total_iters=length)
        rest = lr_scheduler.CosineAnnealingLR(opt, T_max=9000)
        return lr_scheduler.SequentialLR(opt, [warm_up, rest], milestones=[length])

    return make


def without_length(opt: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step))


def told(run: Watched) -> Incident:
    (incident,) = [i for i in run.report.incidents if i.phase == "protocol"]
    assert incident.cause == "scheduler-on-skipped-step"
    assert incident.step == 0
    return incident


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(
    ("make", "lost", "steps", "severity"),
    [
        (one_cycle(10_000), 4, 12, "info"),
        (one_cycle(112, 0.05), 3, 12, "info"),
        (one_cycle(140, 0.05), 4, 12, "warning"),
        (one_cycle(30), 4, 12, "warning"),
        (one_cycle(10_000, 0.0004), 4, 12, "warning"),
        (warmed_up(500), 4, 12, "info"),
        (warmed_up(5), 4, 12, "warning"),
        (without_length, 4, 12, "warning"),
        (without_length, 4, 64, "info"),
        (without_length, 2, 6, "info"),
    ],
)
def test_what_is_lost_is_measured_by_the_schedule(
    make: Make, lost: int, steps: int, severity: str, guard: Guard
) -> None:
    incident = told(guard(lambda: training(make, lost, steps)))
    assert incident.severity == severity
    assert incident.evidence["lost_moves"] == lost or severity == "warning"  # (which is told when it is certain)
    assert [fix.action for fix in incident.fixes] == ["gate-scheduler", "wait"][: 2 if severity == "info" else 1]


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_note_says_how_much_it_is(guard: Guard) -> None:
    run = guard(lambda: training(one_cycle(2000), 4, 100))
    incident = told(run)
    assert "That is 0.2% of the 2000 moves of its schedule, whose first part has 600." in incident.explanation
    assert incident.evidence["schedule_moves"] == 2000
    assert incident.evidence["moves"] > 80  # nearly all that were made
    assert run.report.status == "clean"


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_steps_that_go_on_being_skipped_are_a_warning_in_any_schedule(guard: Guard) -> None:
    incident = told(guard(lambda: training(one_cycle(100_000), 1, 80, lambda step: step % 4 == 3)))
    assert incident.severity == "warning"


def test_the_lengths_of_schedules() -> None:
    opt = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert compat.schedule_length(one_cycle(200)(opt)) == 200
    assert compat.warm_up_length(one_cycle(200)(opt)) == pytest.approx(60)
    assert compat.schedule_length(warmed_up(50)(opt)) == 9050
    assert compat.warm_up_length(warmed_up(50)(opt)) == 50
    both = lr_scheduler.ChainedScheduler([without_length(opt), lr_scheduler.LinearLR(opt, total_iters=7)])
    assert compat.schedule_length(both) == 7
    for made in (without_length(opt), lr_scheduler.StepLR(opt, 30), lr_scheduler.ReduceLROnPlateau(opt)):
        assert (compat.schedule_length(made), compat.warm_up_length(made)) == (None, None)
