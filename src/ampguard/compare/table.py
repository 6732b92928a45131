"""A comparison as a table: rich on a terminal, plain text elsewhere; and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from ampguard.compare.course import Course
from ampguard.compare.distance import distance
from ampguard.compare.verdict import Verdict
from ampguard.report.numbers import readable_number

COLUMNS = ("precision", "steps", "final loss", "from float32", "skipped", "non-finite", "time a step", "memory")
SCHEMA = "ampguard.compare/1"


def print_comparison(courses: Sequence[Course], verdict: Verdict, console: Console | None = None) -> None:
    """Print the table and the recommendation on stdout."""
    console = console or Console(highlight=False, markup=False, emoji=False, force_jupyter=False)
    rows = [row_of(course, reference_of(courses)) for course in courses]
    if console.is_terminal:
        console.print(_rich_table(rows, verdict))
    else:
        for line in plain_lines([COLUMNS, *rows]):
            console.print(line, soft_wrap=True)
    for line in told(courses, verdict):
        console.print(line, soft_wrap=True)


def reference_of(courses: Sequence[Course]) -> Course | None:
    return next((c for c in courses if c.precision == "fp32"), None)


def row_of(course: Course, reference: Course | None) -> tuple[str, ...]:
    away = distance(course, reference) if reference is not None and course is not reference else None
    return (
        course.precision,
        str(course.steps),
        readable_number(course.final_loss) if course.final_loss is not None else "not finite" if course.losses else "-",
        f"{away:.2%}" if away is not None else "-",
        str(course.skipped),
        str(course.nonfinite),
        _time(course.step_seconds),
        f"{course.memory_mib:.0f} MiB" if course.memory_mib is not None else "-",
    )


def told(courses: Sequence[Course], verdict: Verdict) -> list[str]:
    """The recommendation, why not the others, what could not be overridden, where each run is."""
    head = f"recommended: {verdict.recommended}" if verdict.recommended else "recommended: none of these"
    lines = ["", f"{head} - {verdict.reason}"]
    lines += [f"  not {name}: {why}" for name, why in verdict.against.items() if name != verdict.recommended]
    lines += [f"  {c.precision}, not overridden: {what}" for c in courses for what in c.could_not]
    return [*lines, f"runs: {', '.join(c.folder for c in courses)}"]


def plain_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(_aligned(cell, w, i) for i, (cell, w) in enumerate(zip(r, widths, strict=True))) for r in rows]


def as_json(courses: Sequence[Course], verdict: Verdict) -> bytes:
    """The whole comparison, with every loss and incident."""
    reference = reference_of(courses)
    runs: list[dict[str, Any]] = []
    for course in courses:
        away = distance(course, reference) if reference is not None else None
        runs.append({**msgspec.to_builtins(course), "final_loss": course.final_loss, "distance": away})
    whole = {"schema": SCHEMA, "runs": runs, "verdict": msgspec.to_builtins(verdict)}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2)


def _rich_table(rows: Sequence[Sequence[str]], verdict: Verdict) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(COLUMNS):
        table.add_column(name.replace(" ", "\n", 1), justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        style = "bold green" if row[0] == verdict.recommended else "red" if row[2] == "not finite" else None
        table.add_row(*row, style=style)
    return table


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def _time(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
