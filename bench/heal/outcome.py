"""One fault case, healed, held against the same script in float32."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from bench.faults.tools import ROOT, copy_case
from bench.faults.truth import Case
from bench.heal.averaged import AVERAGED, GOAL, MeanApart, mean_apart

from ampguard.compare.course import WARM_UP_STEPS, Course, course_of
from ampguard.compare.distance import noise, shift
from ampguard.incident import Incident
from ampguard.report.history import read_history
from ampguard.report.store import read_report

PRECISION_CAUSES = {"fp16-overflow", "fp16-underflow", "mask-overflow", "gradient-overflow", "gradient-underflow"}
PRECISION_FIXES = {"force-fp32", "use-bf16", "disable-amp"}
NUDGES = (1, 2)
"""Seeds of further runs in float32, whose first weights differ in their last bit."""

COARSE_NUDGES = (3, 4, 5)
"""Seeds of further ones, whose first weights differ by one rounding to float16: what a single step before the fix does."""

BAD_NUMBER = re.compile(r"(?<![\w.])[+-]?(?:nan|inf)(?![\w.])", re.IGNORECASE)
TIMED_OUT = 124
MIN_STEPS = 3
"""Fewer timed steps than these have no median worth a row."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of one case. `loss`: means over the last tenth of the steps; times are seconds a step.

    `apart`: the mean loss of the last quarter from float32's, and `noise`: how much float32's own moves there from step
    to step, both as shares of it, measured as `ampguard compare` does. `repeats`: as `apart`, float32's own runs from
    weights that differ in their last bit. `off_from_there`: as `apart`, the run that is in float32 altogether from the
    failing step on. `coarse_repeats`: as `repeats`, from weights that differ by one rounding to float16. `on_average`: several
    runs of both, from such weights. `bad_printed`: how often the script itself printed nan or inf, as it is and healed.
    """

    case: str
    plain_status: int
    healed_status: int
    steps: int
    steps_in_fp32: int
    fixes: tuple[str, ...]
    explained: bool
    loss: float | None
    loss_in_fp32: float | None
    apart: float | None
    noise: float
    repeats: tuple[float, ...]
    off_from_there: float | None
    bad_printed: tuple[int, int]
    seconds_before: float | None
    seconds_after: float | None
    note: str = ""
    coarse_repeats: tuple[float, ...] = ()
    on_average: MeanApart | None = None

    @property
    def came_to_its_end(self) -> bool:
        return self.healed_status == 0 and self.steps == self.steps_in_fp32

    @property
    def is_carried(self) -> bool:
        """The goal: healed, run to its end, with float32's loss."""
        return self._is_healed and self.apart is not None and abs(self.apart) <= GOAL

    @property
    def trains_as_well(self) -> bool:
        """What `ampguard compare` asks: not above float32's loss by more than the goal, or than that loss's own noise."""
        return self._is_healed and self.apart is not None and self.apart <= max(GOAL, self.noise)

    @property
    def furthest_repeat(self) -> float | None:
        """How far from itself float32 ends."""
        return max(map(abs, self.repeats), default=None)

    @property
    def is_repeatable(self) -> bool:
        """Whether 2 % can be asked of this case: float32 itself was not seen to miss it when a last bit is changed."""
        return self.furthest_repeat is None or self.furthest_repeat <= GOAL

    @property
    def is_as_float32_repeats(self) -> bool:
        """Healed, run to its end, and within the goal of float32's run or of one of its repeats."""
        return self._is_healed and self.apart is not None and self._from_nearest(self.apart) <= GOAL

    @property
    def coarse_spread(self) -> tuple[float, float]:
        """Between which float32 itself ends where its weights differ by what float16 rounds off, at least the goal."""
        ends = (*self.repeats, *self.coarse_repeats)
        return min((-GOAL, *ends)), max((GOAL, *ends))

    @property
    def is_within_spread(self) -> bool:
        """Healed, run to its end, and no further from float32 than float32 is from itself by one rounding to float16."""
        low, high = self.coarse_spread
        return self._is_healed and self.apart is not None and low <= self.apart <= high

    def _from_nearest(self, apart: float) -> float:
        return min(abs(apart - other) for other in (0.0, *self.repeats))

    @property
    def is_lost_before(self) -> bool:
        """Whether not even float32 from the failing step on keeps the goal: what is lost was lost before it."""
        return self.off_from_there is not None and abs(self.off_from_there) > GOAL

    @property
    def _is_healed(self) -> bool:
        return bool(self.fixes) and self.came_to_its_end

    @property
    def slower(self) -> float | None:
        """How often the time of a step before the fix goes into one after it."""
        if self.seconds_before is None or self.seconds_after is None:
            return None
        return self.seconds_after / self.seconds_before


def is_healable(case: Case) -> bool:
    """Whether the case's truth is that a low precision broke it, and that another precision cures it."""
    truth = case.truth
    return (
        truth is not None
        and not PRECISION_CAUSES.isdisjoint(truth.cause)
        and not PRECISION_FIXES.isdisjoint(truth.fixes)
    )


def run_case(case: Case, room: Path, timeout: float) -> None:
    """Run the script as it is, in float32 and healed, in folders of their own under `room`."""
    guarded = ["run", "--out", "../run"]
    _run(case, room / "plain", [], timeout)
    _run(case, room / "fp32", ["-m", "ampguard", *guarded, "--precision", "fp32"], timeout)
    _run(case, room / "heal", ["-m", "ampguard", *guarded, "--on-nonfinite", "heal"], timeout)


def run_controls(case: Case, room: Path, timeout: float, averaged: Sequence[int] = AVERAGED) -> None:
    """Run it healed by switching autocast off; and in float32 and healed from weights that differ by a rounding."""
    guarded = ["run", "--out", "../run"]
    _run(case, room / "off", ["-m", "bench.heal.switched_off", *guarded, "--on-nonfinite", "heal"], timeout)
    for seed in (*NUDGES, *averaged):
        dtype = "float32" if seed in NUDGES else "float16"
        nudged = ["-m", "bench.heal.nudged", str(seed), dtype, *guarded]
        _run(case, room / f"nudged{seed}", [*nudged, "--precision", "fp32"], timeout)
        if seed in averaged:
            _run(case, room / f"healed{seed}", [*nudged, "--on-nonfinite", "heal"], timeout)


def outcome_of(case: Case, room: Path) -> Outcome:
    """What the runs of `run_case` left in `room`.

    The loss of a step that failed and was then healed is the broken run's, and is not compared.
    """
    folder = room / "heal" / "run"
    in_fp32 = course_of(room / "fp32" / "run", "fp32", _status(room / "fp32"))
    healed = without_steps(course_of(folder, "heal", _status(room / "heal")), steps := healed_steps(folder))
    before, after = step_seconds(folder, steps)
    return Outcome(
        case.name,
        _status(room / "plain"),
        healed.status,
        healed.steps,
        in_fp32.steps,
        fixes_of(folder),
        is_explained(case, healed.errors, steps_at_lower_scale(folder)),
        healed.final_loss,
        in_fp32.final_loss,
        shift(healed, in_fp32),
        noise(in_fp32),
        repeats_of(room, in_fp32, NUDGES),
        switched_off(room, in_fp32),
        (bad_numbers(room / "plain"), bad_numbers(room / "heal")),
        before,
        after,
        "; ".join(filter(None, [healed.trouble, in_fp32.trouble, *in_fp32.could_not, *healed.could_not])),
        repeats_of(room, in_fp32, COARSE_NUDGES),
        mean_apart(healed_repeats_of(room, in_fp32, AVERAGED), repeats_of(room, in_fp32, AVERAGED)),
    )


def repeats_of(room: Path, in_fp32: Course, seeds: Sequence[int]) -> tuple[float, ...]:
    """How far float32's loss is from itself where the first weights were nudged; empty where none was run."""
    rooms = [room / f"nudged{seed}" for seed in seeds]
    found = [shift(course_of(r / "run", "fp32", _status(r)), in_fp32) for r in rooms if _has_report(r)]
    return tuple(apart for apart in found if apart is not None)


def healed_repeats_of(room: Path, in_fp32: Course, seeds: Sequence[int]) -> tuple[float, ...]:
    """The same of healed runs from nudged weights that came to their end."""
    rooms = [r for seed in seeds if _has_report(r := room / f"healed{seed}")]
    courses = [without_steps(course_of(r / "run", "heal", _status(r)), healed_steps(r / "run")) for r in rooms]
    ended = [course for course in courses if (course.status, course.steps) == (0, in_fp32.steps)]
    return tuple(apart for course in ended if (apart := shift(course, in_fp32)) is not None)


def switched_off(room: Path, in_fp32: Course) -> float | None:
    """How far the run ends that is in float32 altogether from the failing step on; None where it was not switched off."""
    folder = room / "off" / "run"
    if not _has_report(room / "off") or not any(fix.startswith("disable-amp") for fix in fixes_of(folder)):
        return None
    return shift(without_steps(course_of(folder, "off", _status(room / "off")), healed_steps(folder)), in_fp32)


def _has_report(room: Path) -> bool:
    return (room / "run" / "report.json").is_file()


def bad_numbers(room: Path) -> int:
    """How often a script printed nan or inf."""
    return len(BAD_NUMBER.findall((room / "stdout.txt").read_text(encoding="utf-8", errors="replace")))


def without_steps(course: Course, steps: Sequence[int]) -> Course:
    """The course, as if the losses of these steps had not been measured."""
    losses = tuple(None if step in steps else loss for step, loss in enumerate(course.losses))
    return msgspec.structs.replace(course, losses=losses)


def is_explained(case: Case, incidents: Sequence[Incident], earlier: Sequence[int]) -> bool:
    """Whether the failing step has a report with an accepted cause.

    `earlier`: steps that were made at a lower loss scale, and that the script as it is skips: behind one of them the failure
    may come in another step.
    """
    truth = case.truth
    assert truth is not None
    return any(
        i.cause in truth.cause and (i.step in truth.steps or any(step < i.step for step in earlier)) for i in incidents
    )


def healed_steps(folder: Path) -> list[int]:
    """The steps in which a fix was applied."""
    return [entry["step"] for entry in _healed(folder)]


def fixes_of(folder: Path) -> tuple[str, ...]:
    """What was applied, in words: `force-fp32 blocks.0.attn`."""
    return tuple(f"{entry['action']} {entry['target'] or ''}".strip() for entry in _healed(folder))


def steps_at_lower_scale(folder: Path) -> list[int]:
    """The steps in which the loss scale was too high, and that were made again at a lower one."""
    return list(_run_of(folder).get("steps_at_lower_loss_scale", []))


def _healed(folder: Path) -> list[dict[str, Any]]:
    return list(_run_of(folder).get("healed", []))


def _run_of(folder: Path) -> dict[str, Any]:
    """What the report says of overrides."""
    if not (folder / "report.json").is_file():
        return {}
    run = read_report(folder).run
    return run if isinstance(run, dict) else {}


def step_seconds(folder: Path, healed: Sequence[int]) -> tuple[float | None, float | None]:
    """Medians of the steps before the first fix (but the warm-up) and after the last; investigations are in neither."""
    if not healed:
        return None, None
    with read_history(folder) as history:
        rows = [row for row in history.steps(WARM_UP_STEPS) if row.seconds is not None]
    before = [row.seconds for row in rows if row.step < min(healed)]
    after = [row.seconds for row in rows if row.step > max(healed) + 1]
    return _median(before), _median(after)


def _median(seconds: Sequence[float | None]) -> float | None:
    known = [s for s in seconds if s is not None]
    return statistics.median(known) if len(known) >= MIN_STEPS else None


def _status(room: Path) -> int:
    return int((room / "status.txt").read_text(encoding="utf-8"))


def _run(case: Case, room: Path, before: list[str], timeout: float) -> None:
    """One process; its exit status is noted as 124 where it took longer than `timeout` seconds."""
    room.mkdir(parents=True)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "NO_COLOR": "1"}
    command = [sys.executable, *before, *case.command]
    try:
        done = subprocess.run(
            command, cwd=copy_case(case, room), env=env, timeout=timeout, capture_output=True, check=False
        )
        status, printed, said = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        status, printed, said = TIMED_OUT, expired.stdout or b"", expired.stderr or b""
    (room / "stderr.txt").write_bytes(said)
    (room / "stdout.txt").write_bytes(printed)
    (room / "status.txt").write_text(str(status), encoding="utf-8")
