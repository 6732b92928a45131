"""The healing benchmark: which cases it takes, when a run counts as carried, and one case from end to end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import warm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import bench.heal.outcome  # noqa: E402
from bench.faults.truth import CASES, load_case, load_cases  # noqa: E402
from bench.heal.averaged import mean_apart  # noqa: E402
from bench.heal.nudged import nudging  # noqa: E402
from bench.heal.outcome import (  # noqa: E402
    BAD_NUMBER,
    Outcome,
    healed_repeats_of,
    is_explained,
    is_healable,
    outcome_of,
    run_case,
    run_controls,
    step_seconds,
    without_steps,
)

from ampguard.compare.course import Course, course_of  # noqa: E402
from ampguard.incident import Incident  # noqa: E402
from ampguard.report.history import StepRow  # noqa: E402
from ampguard.report.history_writer import HistoryWriter  # noqa: E402

CARRIED = Outcome(
    case="p-one",
    plain_status=1,
    healed_status=0,
    steps=40,
    steps_in_fp32=40,
    fixes=("force-fp32 blocks.0.attn",),
    explained=True,
    loss=1.01,
    loss_in_fp32=1.0,
    apart=0.01,
    noise=0.1,
    repeats=(0.0, -0.03),
    off_from_there=0.005,
    bad_printed=(3, 0),
    seconds_before=0.010,
    seconds_after=0.012,
)


def test_a_case_is_taken_if_a_precision_broke_it_and_another_cures_it() -> None:
    taken = {case.name for case in load_cases() if is_healable(case)}
    assert "p-mse-forecast-square" in taken
    assert "g-clip-blank-frame-normalize" in taken
    assert "p-doc-mask-two-minima-bf16" not in taken  # only another mask helps
    assert "a-dice-empty-roi" not in taken  # 0 / 0 in every precision


@pytest.mark.parametrize(
    ("apart", "coarse", "within"),
    [
        (0.019, (), True),
        (0.04, (), False),
        (0.04, (0.05, -0.01), True),
        (-0.04, (0.05, -0.01), False),  # only above did float32 end so far from itself
        (0.06, (0.05, -0.01), False),
    ],
)
def test_within_the_spread_of_float32(apart: float, coarse: tuple[float, ...], within: bool) -> None:
    outcome = msgspec.structs.replace(CARRIED, apart=apart, repeats=(), coarse_repeats=coarse)
    assert outcome.is_within_spread is within


@pytest.mark.parametrize(
    ("changed", "carried", "as_well"),
    [
        ({}, True, True),
        ({"apart": 0.05}, False, True),  # within float32's own noise
        ({"apart": 0.15}, False, False),
        ({"apart": -0.05}, False, True),
        ({"apart": None}, False, False),
        ({"fixes": ()}, False, False),
        ({"healed_status": 1}, False, False),
        ({"steps": 39}, False, False),
    ],
)
def test_carried(changed: dict[str, object], carried: bool, as_well: bool) -> None:
    outcome = msgspec.structs.replace(CARRIED, **changed)
    assert (outcome.is_carried, outcome.trains_as_well) == (carried, as_well)
    assert outcome.slower == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("apart", "within"), [(0.02, True), (-0.04, True), (-0.06, False), (0.03, False), (None, False)]
)
def test_as_far_as_float32_repeats_itself(apart: float | None, within: bool) -> None:
    outcome = msgspec.structs.replace(CARRIED, apart=apart)
    assert outcome.is_as_float32_repeats is within
    assert not outcome.is_repeatable
    assert msgspec.structs.replace(outcome, repeats=()).is_repeatable
    assert not msgspec.structs.replace(outcome, fixes=()).is_as_float32_repeats


def test_means_of_several_runs() -> None:
    found = mean_apart([0.05, 0.07, 0.03], [0.0, 0.02, -0.02])
    assert found is not None
    assert found.apart == pytest.approx(0.05)
    assert found.error == pytest.approx((2 * 0.02**2 / 3) ** 0.5)
    assert found.spread == pytest.approx(0.02)
    assert not found.is_within_goal
    assert str(found) == "+5.0% ± 1.6%"
    assert mean_apart([0.05, 0.07, 0.03], [0.0, 0.02]) is None


def test_what_was_lost_before_the_failing_step() -> None:
    assert not CARRIED.is_lost_before
    assert msgspec.structs.replace(CARRIED, off_from_there=-0.3).is_lost_before
    assert not msgspec.structs.replace(CARRIED, off_from_there=None).is_lost_before


def test_a_failure_may_come_later_behind_a_step_that_was_not_skipped() -> None:
    case = load_case(CASES / "p-where-scalar-pointer")
    assert case.truth is not None
    (step, *_), cause = case.truth.steps, next(iter(case.truth.cause))
    found = [Incident(step + 2, 0, "train", "forward", "error", cause, None, None, None, None, "")]
    assert not is_explained(case, found, [])
    assert is_explained(case, found, [step])
    assert not is_explained(case, found, [step + 2])
    assert not is_explained(case, [msgspec.structs.replace(found[0], cause="overflow")], [step])


def test_weights_are_nudged_once_by_their_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", nudging(torch.optim.Optimizer.__init__, 1))
    model = torch.nn.Linear(40, 40)
    before = model.weight.detach().clone()
    torch.optim.SGD(model.parameters(), lr=0.1)
    once = model.weight.detach().clone()
    torch.optim.SGD([{"params": [model.weight]}], lr=0.1)
    assert torch.equal(model.weight, once)
    off = (once / before - 1).abs()
    assert 0 < off.max() <= 3 * torch.finfo(torch.float32).eps
    assert (once > before).any()
    assert (once < before).any()


def test_bad_numbers_that_a_script_prints() -> None:
    assert len(BAD_NUMBER.findall("loss nan, norm inf (-inf) acc=NaN")) == 4
    assert BAD_NUMBER.findall("info: nanoGPT, 1.5e3, dinf, inference, nan_count 0") == []


def test_the_times_leave_warm_up_and_the_healed_steps_out(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, print)
    for step in range(20):
        slow = step < 3 or step in (8, 9, 10)
        writer.step(StepRow(step, seconds=9.0 if slow else 0.1 if step < 8 else 0.2))
    writer.close()
    assert step_seconds(tmp_path, [8, 9]) == (0.1, 0.2)
    assert step_seconds(tmp_path, [4]) == (None, 0.2)
    assert step_seconds(tmp_path, []) == (None, None)


def test_the_broken_steps_loss_is_not_compared() -> None:
    course = Course("heal", 0, 3, losses=(1.0, 50.0, 2.0))
    assert without_steps(course, [1]).losses == (1.0, None, 2.0)


def forked(command: list[str], **how: Any) -> subprocess.CompletedProcess[bytes]:
    done = warm.run(command, cwd=how["cwd"], env=how["env"], timeout=how["timeout"])
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.encode(), done.stderr.encode())


@pytest.mark.slow
def test_one_case_is_healed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.heal.outcome.subprocess, "run", forked)
    case = load_case(CASES / "p-where-scalar-pointer")
    run_case(case, tmp_path, timeout=120.0)
    assert outcome_of(case, tmp_path).repeats == ()
    assert outcome_of(case, tmp_path).off_from_there is None
    run_controls(case, tmp_path, timeout=120.0, averaged=(3,))
    outcome = outcome_of(case, tmp_path)
    assert outcome.explained
    assert outcome.is_carried
    assert (len(outcome.repeats), len(outcome.coarse_repeats)) == (2, 1)
    assert outcome.on_average is None  # of one run nothing is known
    (healed_again,) = healed_repeats_of(tmp_path, course_of(tmp_path / "fp32" / "run", "fp32", 0), [3])
    assert healed_again == pytest.approx(0.0, abs=0.05)
    assert outcome.off_from_there == pytest.approx(0.0, abs=0.02)
    assert outcome.bad_printed[0] > 0
    assert outcome.bad_printed[1] == 0


def test_a_run_that_takes_too_long_is_not_carried(tmp_path: Path) -> None:
    case = load_case(CASES / "p-where-scalar-pointer")
    run_case(case, tmp_path, timeout=0.05)
    outcome = outcome_of(case, tmp_path)
    assert (outcome.plain_status, outcome.healed_status) == (124, 124)
    assert not outcome.is_carried
    assert outcome.note
