"""The results as text: one line a case while it runs, the totals, and results.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .scoring import COLUMNS, Score, share

MARK = {True: "yes", False: "NO", None: "-"}


def header() -> str:
    return f"{'case':44} " + " ".join(f"{column:6}" for column in (*COLUMNS, "exit"))


def line(row: Score) -> str:
    """One case. A healthy one is either quiet or a false alarm."""
    if row.kind == "healthy":
        cells = f"{'FALSE ALARM' if row.false_alarm else 'quiet':55} "
    else:
        cells = "".join(f"{MARK[getattr(row, column)]:7}" for column in COLUMNS)
    wrong = "" if row.is_perfect or not row.note else f"\n{'':6}said: {row.note}"
    return f"{row.case:44} {cells}{MARK[row.same_exit]}{wrong}"


def percent(right: int, asked: int) -> str:
    return f"{100 * right / asked:.0f} % ({right}/{asked})" if asked else "-"


def totals(rows: Sequence[Score]) -> dict[str, str]:
    """Column -> share of right answers, then the false alarms and the unchanged exit statuses."""
    alarms, healthy = share(rows, "false_alarm")
    return {
        **{column: percent(*share(rows, column)) for column in COLUMNS},
        "false alarms": f"{alarms} of {healthy}" if healthy else "-",
        "exit status kept": percent(*share(rows, "same_exit")),
    }


def totals_text(results: Mapping[str, Sequence[Score]]) -> str:
    parts = []
    for tool, rows in results.items():
        parts += ["", tool, *(f"  {name:18} {value}" for name, value in totals(rows).items())]
    return "\n".join(parts)


def markdown(results: Mapping[str, Sequence[Score]], torch_version: str) -> str:
    """results.md: the totals of each tool, then each tool's cases. No date: it changes only with the results."""
    columns = list(totals([]))
    parts = [
        "# Fault cases: what each tool answers",
        "",
        f"Written by `python -m bench.faults.run --tool all`, torch {torch_version}, CPU, one thread. README.md says"
        " what the columns mean and how each tool was run.",
        "",
        "| tool | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    parts += [f"| {tool} | " + " | ".join(totals(rows).values()) + " |" for tool, rows in results.items()]
    for tool, rows in results.items():
        parts += ["", f"## {tool}", "", *_cases(rows)]
    return "\n".join(parts) + "\n"


def _cases(rows: Sequence[Score]) -> list[str]:
    faults = [row for row in rows if row.kind == "fault"]
    healthy = [row for row in rows if row.kind == "healthy"]
    lines = ["| case | " + " | ".join((*COLUMNS, "exit")) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    lines += [
        f"| {row.case} | " + " | ".join(MARK[getattr(row, column)] for column in (*COLUMNS, "same_exit")) + " |"
        for row in faults
    ]
    alarms = [row.case for row in healthy if row.false_alarm]
    lines += ["", f"Healthy cases: {len(healthy)}; false alarms: {', '.join(alarms) or 'none'}."]
    return lines
