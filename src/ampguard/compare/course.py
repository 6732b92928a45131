"""The course of one run, read from its folder."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import msgspec

from ampguard.errors import RunFolderError
from ampguard.incident import Incident
from ampguard.report.history import StepRow, read_history
from ampguard.report.store import read_report

WARM_UP_STEPS = 3
"""Steps at the beginning whose time says little."""
OUTPUT = "output.txt"
"""Behind a run folder's name and a hyphen: what the script printed."""


class Course(msgspec.Struct, frozen=True):
    """What a run under one precision was like. Times in seconds a step, memory in MiB.

    `losses` has one entry a step, None where it was not measured or not finite. `nonfinite`: steps whose loss was not finite,
    or whose measured gradient norm was not although the step was made. `skipped_late`: those of `skipped` in the second
    half. `status`: the script's exit status.
    """

    precision: str
    status: int
    steps: int
    losses: tuple[float | None, ...] = ()
    skipped: int = 0
    skipped_late: int = 0
    nonfinite: int = 0
    step_seconds: float | None = None
    memory_mib: float | None = None
    incidents: tuple[Incident, ...] = ()
    could_not: tuple[str, ...] = ()
    folder: str = ""
    trouble: str | None = None

    @property
    def final_loss(self) -> float | None:
        """The mean of the last tenth, at least five steps; None where the run did not end on finite losses."""
        tail = self.losses[-max(5, len(self.losses) // 10) :]
        finite = [loss for loss in tail if loss is not None]
        return statistics.fmean(finite) if len(finite) > len(tail) / 2 else None

    @property
    def errors(self) -> tuple[Incident, ...]:
        return tuple(incident for incident in self.incidents if incident.severity == "error")


def course_of(folder: Path, precision: str, status: int) -> Course:
    """Read what a run left. A run that left nothing readable is a course with `trouble`."""
    try:
        report = read_report(folder)
        with read_history(folder) as history:
            rows = list(history.steps())
    except RunFolderError as error:
        return Course(precision, status, 0, folder=str(folder), trouble=str(error))
    run: dict[str, Any] = report.run if isinstance(report.run, dict) else {}
    seconds = [row.seconds for row in rows[WARM_UP_STEPS:] or rows if row.seconds is not None]
    skips = [row.step for row in rows if row.skipped]
    return Course(
        precision,
        status,
        report.steps,
        tuple(row.loss if row.loss is not None and math.isfinite(row.loss) else None for row in rows),
        len(skips),
        sum(step >= len(rows) // 2 for step in skips),
        sum(not _is_finite(row) for row in rows),
        statistics.median(seconds) if seconds else None,
        _memory(run),
        report.incidents,
        tuple(run.get("could_not", ())),
        str(folder),
    )


def _is_finite(row: StepRow) -> bool:
    """Whether nothing was bad but gradients for which the step was skipped, as a scaler does while it finds its scale."""
    seen = (row.loss,) if row.skipped else (row.loss, row.grad_norm)
    return all(value is None or math.isfinite(value) for value in seen)


def _memory(run: dict[str, Any]) -> float | None:
    peaks: dict[str, float] = run.get("peak_memory_mib") or {}
    return peaks.get("device", peaks.get("host"))
