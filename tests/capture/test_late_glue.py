"""Late in a run of short steps not everything can be recorded: what a step is given behind a rollout, a loss of hundreds of
operators. What is passed over is explained when it comes back."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched

from ampguard.capture.events.kept_events import KeptEvents
from ampguard.capture.glue import schedule
from ampguard.capture.glue.schedule import FREE_GLUE_OPS, TapeSchedule
from ampguard.capture.root_calls import pace

Guard = Callable[..., Watched]
BAD = 9


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is free, and calls without gradients rest from the first one on."""
    monkeypatch.setattr(pace, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(pace, "SHARE", 0.0)
    monkeypatch.setattr(pace, "BEHIND_SHARE", 1.0)
    monkeypatch.setattr(schedule, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(schedule, "GLUE_TIME_SHARE", 0.0)


def reinforce(is_bad: Callable[[int], bool], moves: int = 6) -> None:
    """Returns are standardized; where all rewards are the same, by 0."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    for update in range(BAD + 5):
        seen = []
        with torch.no_grad():
            for _ in range(moves):
                seen.append(torch.randn(4))
                policy(seen[-1]).argmax()
        reward = torch.zeros(moves) if is_bad(update) else torch.rand(moves)
        gain = standardized(reward)
        loss = -(policy(torch.stack(seen)).log_softmax(1)[:, 0] * gain).mean()
        optimizer.zero_grad()
        loss.backward()
        if torch.isfinite(loss):
            optimizer.step()


def standardized(reward: Tensor) -> Tensor:
    return (reward - reward.mean()) / reward.std()


def test_what_is_computed_behind_a_rollout_is_explained(guard: Guard) -> None:
    run = guard(lambda: reinforce(lambda update: update == BAD))
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.op) == ("division-by-zero", BAD, "aten.div.Tensor")
    assert incident.location is not None
    assert incident.location.code == "return (reward - reward.mean()) / reward.std()"
    assert "seen_in_step" not in incident.evidence


def test_what_is_computed_behind_a_rollout_is_not_taped_where_that_takes_too_much(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "BEHIND_SHARE", 0.0)
    run = guard(lambda: reinforce(lambda update: update == BAD))
    assert run.faults == 0, run.stderr
    assert run.causes == ["division-by-zero"]
    assert run.first.evidence["computed_again"] is True  # and was not recorded


def test_what_was_passed_over_is_told_of_the_first_failure_when_it_comes_back(guard: Guard) -> None:
    """Each rollout is longer than the one before: which call is its last is not known."""

    def body() -> None:
        torch.manual_seed(0)
        policy = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
        for update in range(BAD + 5):
            with torch.no_grad():
                for _ in range(2 + update):
                    policy(torch.randn(4)).argmax()
            gain = standardized(torch.zeros(6) if update >= BAD else torch.rand(6))
            loss = -(policy(torch.randn(6, 4)).log_softmax(1)[:, 0] * gain).mean()
            optimizer.zero_grad()
            loss.backward()
            if torch.isfinite(loss):
                optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.occurrences) == ("division-by-zero", BAD, 5)
    assert incident.evidence["seen_in_step"] == BAD + 1
    assert not run.session._recorder.pace.is_attentive


def pairwise(out: Tensor, bad: bool) -> Tensor:
    """Some 200 operators, box by box."""
    loss = out.new_zeros(())
    for i in range(40):
        size = out[i % 8].sigmoid().sum() * (0.0 if bad and i == 35 else 1.0)
        loss = loss + (size - size.detach()) / size
    return loss


def long_loss(is_bad: Callable[[int], bool]) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(BAD + 8):
        x = torch.randn(8, 4)
        loss = pairwise(net(x), is_bad(step))
        optimizer.zero_grad()
        loss.backward()
        if torch.isfinite(loss):
            optimizer.step()


@pytest.mark.slow
def test_a_loss_of_hundreds_of_operators_is_explained_when_it_fails_again(guard: Guard) -> None:
    run = guard(lambda: long_loss(lambda step: step >= BAD))
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.occurrences) == ("division-by-zero", BAD, 8)
    assert incident.location is not None
    assert incident.location.code == "loss = loss + (size - size.detach()) / size"


@pytest.mark.slow
def test_a_divergence_that_ends_in_such_a_loss_is_told_of_the_first_bad_one(guard: Guard) -> None:
    """Some steps later its loss is bad where nothing is recorded any more: that is no news."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(120):
            x = torch.randn(16, 4)
            moved = net(x)
            for _ in range(60):
                moved = moved * 1.0 + 0.001 * x - 0.001 * x
            loss = (moved - x).square().mean()
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            if step == 20:
                optimizer.param_groups[0]["lr"] = 30.0
            optimizer.step()

    losses: list[float] = []
    run = guard(body)
    assert run.faults == 0, run.stderr
    first = next(step for step, loss in enumerate(losses) if not math.isfinite(loss))
    assert run.causes == ["divergence"]
    assert run.first.step == first


def steps_of(plan: TapeSchedule, operators: int, steps: int) -> list[int]:
    """How many operators each step has taped, of so many in its loss."""
    taped = []
    for step in range(3, 3 + steps):
        limit = plan.training_limit
        taped.append(min(limit, operators))
        if 0 < limit <= operators:
            plan.exhausted(has_root=True)
        plan.ended(step, 0.005, 0.005, has_root=True, taped=taped[-1])
    return taped


def test_a_step_in_several_is_taped_whole_where_all_would_be_too_much() -> None:
    taped = steps_of(TapeSchedule(), 300, 60)[4:]
    assert set(taped) == {0, 300}
    assert sum(taped) / len(taped) <= FREE_GLUE_OPS + 10


class Counted(KeptEvents):
    """A log of which only the size of the running iteration is asked for."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    @property
    def size_of_iteration(self) -> int:
        return self._size


def test_what_a_step_of_many_calls_may_tape_is_counted_over_all_of_them() -> None:
    """Twelve calls of modules a step, and 25 operators behind each."""
    plan, taped = TapeSchedule(), []
    for step in range(3, 63):
        size = 0
        for _ in range(12):
            left = min(25, plan.left_for_training(Counted(size)))
            size += left
            if 0 < left < 25:
                plan.exhausted(has_root=True)
        taped.append(size)
        plan.ended(step, 0.005, 0.005, has_root=True, taped=size)
    assert set(taped[8:]) == {0, 300}
    assert sum(taped[8:]) / len(taped[8:]) <= FREE_GLUE_OPS + 25


def test_a_step_that_fits_is_taped_each_time() -> None:
    assert set(steps_of(TapeSchedule(), 90, 40)) == {90}


def test_steps_that_have_become_shorter_are_taped_each_time_again() -> None:
    plan = TapeSchedule()
    steps_of(plan, 300, 20)
    assert set(steps_of(plan, 60, 20)[8:]) == {60}


def test_glue_between_calls_that_are_kept_is_followed(guard: Guard) -> None:
    """Events without gradients are recorded as operators, among calls that are kept as such: both belong to the step."""

    def body() -> None:
        torch.manual_seed(0)
        net, teacher = nn.Linear(4, 3), nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for step in range(BAD + 20):
            x = torch.randn(8, 4) * 1.0
            with torch.no_grad():
                teacher(x)
                share = teacher(x).sigmoid() * (0.0 if step == BAD + 16 else 1.0)
                share = share / share.sum(1, keepdim=True)
            loss = net(x).square().mean() * 0.1
            loss = loss - (share * F.log_softmax(net(x), 1)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            if torch.isfinite(loss):
                optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), net.parameters(), strict=True):
                    slow.mul_(0.9).add_(fast * 0.1)

    run = guard(body)
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step) == ("division-by-zero", BAD + 16)
