"""What is computed between two steps is taped where the next step uses it, and not where it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ampguard
from ampguard.capture.glue import schedule
from ampguard.run.session import Session

STEPS, BAD = 70, 66

Prepare = Callable[[int, Tensor], Tensor]
Measure = Callable[[Tensor, Tensor], Any]


def trained(session: Session, prepare: Prepare, measure: Measure | None) -> list[bool]:
    """Whether the time between two steps was taped, step by step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = [(torch.rand(5, 4) + 0.5, torch.randint(0, 3, (5,))) for _ in range(STEPS)]
    taped = []
    for step, (x, y) in enumerate(batches):
        x = prepare(step, x)
        out = model(x)
        loss = functional.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        taped.append(not session._recorder.schedule.has_no_prefix)
        if measure is not None:
            measure(out, y)
    return taped


def accuracy(out: Tensor, y: Tensor) -> float:
    return float((out.argmax(1) == y).float().mean())


def standardized(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std()


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taping is never next to nothing."""
    monkeypatch.setattr(schedule, "FIRST_PREFIXES", 0)
    monkeypatch.setattr(schedule, "PREFIX_TIME_SHARE", 0.0)


@pytest.mark.usefixtures("costs")
def test_metrics_of_the_last_step_are_not_taped(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        taped = trained(session, lambda step, x: x, accuracy)
    assert taped[0]
    assert sum(taped[8:]) == 2  # it is looked at again now and then


@pytest.mark.parametrize("begins", [0, 20, 63])
@pytest.mark.parametrize("measure", [None, accuracy])
def test_preprocessing_is_told_also_where_it_begins_late(begins: int, measure: Measure | None, tmp_path: Path) -> None:
    def prepare(step: int, x: Tensor) -> Tensor:
        if step == BAD:
            x = torch.full_like(x, 0.25)
        return standardized(x) if step >= begins else x

    with ampguard.watch(out=tmp_path / "run") as session:
        taped = trained(session, prepare, measure)
    (incident,) = session.report.incidents
    assert (incident.cause, incident.step) == ("division-by-zero", BAD)
    assert incident.location is not None
    assert incident.location.code == "return (x - x.mean()) / x.std()"
    if begins == 0:
        assert all(taped)


def moved(step: int, x: Tensor) -> Tensor:
    return torch.cat([x[2:], x[:2]]).to("cpu").reshape(5, 4).clone()


@pytest.mark.usefixtures("costs")
def test_batches_that_are_only_joined_and_moved_are_not_taped(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        taped = trained(session, moved, None)
    assert taped[0]
    assert sum(taped[8:]) == 2


def test_a_bad_value_among_moved_ones_is_the_datas(tmp_path: Path) -> None:
    def prepare(step: int, x: Tensor) -> Tensor:
        if step == BAD:
            x.numpy()[3] = float("nan")  # as it came from the file
        return moved(step, x)

    with ampguard.watch(out=tmp_path / "run") as session:
        trained(session, prepare, None)
    incident = session.report.incidents[0]
    assert (incident.cause, incident.step) == ("nonfinite-input", BAD)
    assert incident.evidence["samples"] == [1]


@pytest.mark.parametrize("narrow", [torch.float16, torch.float64])
def test_a_conversion_to_another_type_is_computing(narrow: torch.dtype, tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        taped = trained(session, lambda step, x: x.to(narrow).to(torch.float32), None)
    assert all(taped)


def test_preprocessing_that_comes_at_times_is_told(tmp_path: Path) -> None:
    def prepare(step: int, x: Tensor) -> Tensor:
        if step % 7 not in (3, 5):  # and nothing in the four steps between
            return x
        return standardized(torch.ones(5, 4) if step == BAD else x)

    with ampguard.watch(out=tmp_path / "run") as session:
        trained(session, prepare, None)
    first = session.report.incidents[0]
    assert (first.cause, first.step, first.op) == ("division-by-zero", BAD, "aten.div.Tensor")


def test_what_no_step_needs_is_taped_as_long_as_that_costs_next_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script may write to its weights there."""
    monkeypatch.setattr(schedule, "PREFIX_TIME_SHARE", 0.0)
    with ampguard.watch(out=tmp_path / "new") as session:
        taped = trained(session, lambda step, x: x, accuracy)
    assert all(taped[: schedule.FIRST_PREFIXES - 1])
    assert sum(taped[schedule.FIRST_PREFIXES :]) == 1  # looked at again
    monkeypatch.setattr(schedule, "PREFIX_TIME_SHARE", 1.0)
    with ampguard.watch(out=tmp_path / "cheap") as session:
        taped = trained(session, lambda step, x: x, accuracy)
    assert all(taped)


def cleared_first(session: Session, prepare: Prepare, behind: Prepare) -> list[int]:
    """A loop that prepares its batch, clears the gradients and prepares the rest; operators taped before it cleared them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = [(torch.rand(5, 4) + 0.5, torch.randint(0, 3, (5,))) for _ in range(STEPS)]
    taped = []
    for step, (x, y) in enumerate(batches):
        x = prepare(step, x)
        taped.append(session._recorder.log.size_of_iteration)
        optimizer.zero_grad()
        functional.cross_entropy(model(behind(step, x)), y).backward()
        optimizer.step()
    return taped


@pytest.mark.parametrize("begins", [0, 20, 63])
@pytest.mark.parametrize("behind", [lambda step, x: x, lambda step, x: standardized(x)])
def test_what_is_prepared_before_gradients_are_cleared_is_told(begins: int, behind: Prepare, tmp_path: Path) -> None:
    def prepare(step: int, x: Tensor) -> Tensor:
        if step < begins:
            return x
        low = x.amin() if step != BAD else x.amax()
        return (x - x.mean()) / (x.amax() - low)

    with ampguard.watch(out=tmp_path / "run") as session:
        cleared_first(session, prepare, behind)
    (incident,) = session.report.incidents
    assert (incident.cause, incident.step) == ("division-by-zero", BAD)
    assert incident.location is not None
    assert incident.location.code == "return (x - x.mean()) / (x.amax() - low)"


@pytest.mark.usefixtures("costs")
@pytest.mark.parametrize("behind", [lambda step, x: x, lambda step, x: standardized(x)])
def test_what_no_step_uses_is_not_taped_before_gradients_are_cleared(behind: Prepare, tmp_path: Path) -> None:
    def measure(step: int, x: Tensor) -> Tensor:
        (x.argmax(1) == 0).float().mean()
        return x

    with ampguard.watch(out=tmp_path / "run") as session:
        taped = cleared_first(session, measure, behind)
    assert max(taped) > 0
    assert sum(map(bool, taped[12:])) <= 2
