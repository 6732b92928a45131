"""How a run went, in a few lines at its end: on stderr, since stdout belongs to the script.

Most runs have nothing else to tell, so rich is loaded only where there is a terminal to colour.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ampguard.incident import Incident, Location, Report, Severity, status_of
from ampguard.stderr import stream

if TYPE_CHECKING:
    from rich.console import Console

STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}
_MAX_SUMMARY_LINES = 20

Part: TypeAlias = tuple[str, str]
"""Some text and its style."""


def print_summary(report: Report, path: Path | None, console: Console | None = None) -> None:
    """Print how the run went, one line per incident, and where the report is (`path` is None if it is nowhere).

    A closed or broken stderr is no reason to disturb a training.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        out = stream()
        if console is None and (out is None or not out.isatty()):
            for line in _summary_lines(report, path) if out is not None else ():
                print("".join(text for text, _ in line), file=out)
            return
        from rich.text import Text

        from ampguard.report.console import stderr_console

        console = console or stderr_console()
        for line in _summary_lines(report, path):
            console.print(Text.assemble(*line), soft_wrap=True)


def short_path(file: str) -> str:
    """`file` relative to the working directory where it lies inside, else as it is."""
    with contextlib.suppress(OSError, ValueError):
        relative = os.path.relpath(file)
        if not relative.startswith(os.pardir):
            return relative
    return file


def _line_of(location: Location | None) -> str:
    return f"{Path(location.file).name}:{location.line}" if location is not None else ""


def _module_of(incident: Incident) -> str:
    """The module's name; that of a place in a list says what it is."""
    name = incident.module or ""
    return f"module {name}" if name.replace(".", "").isdigit() else name


def _summary_lines(report: Report, path: Path | None) -> Iterator[list[Part]]:
    steps = "1 step" if report.steps == 1 else f"{report.steps} steps"
    counted = [_count(report.incidents)] if report.incidents else []
    is_off = isinstance(report.off_since_step, int)
    if report.status == "incidents" and status_of(report.incidents) == "clean" and not is_off:
        counted.append("bad losses that were not looked into")
    outcome = ", ".join(counted) or "no incident"
    if is_off:
        outcome += f" until the guard went off in step {report.off_since_step}; nothing after that was watched"
    style = "bold green" if report.status == "clean" else "bold"
    yield [("ampguard: ", style), (f"{steps}, ", ""), (outcome, style)]
    for incident in report.incidents[:_MAX_SUMMARY_LINES]:
        seen = f" (seen {incident.occurrences} times)" if incident.occurrences > 1 else ""
        place = _module_of(incident) or _line_of(incident.location)
        yield [
            ("  ", ""),
            (f"{incident.severity:<8}", STYLES[incident.severity]),
            (f"{incident.cause:<21} step {incident.step:<6} {place}{seen}".rstrip(), ""),
        ]
    if len(report.incidents) > _MAX_SUMMARY_LINES:
        yield [(f"  and {len(report.incidents) - _MAX_SUMMARY_LINES} more", "")]
    if path is not None:
        yield [(f"report: {short_path(str(path))}", "")]


def _count(incidents: Sequence[Incident]) -> str:
    counts = {severity: sum(i.severity == severity for i in incidents) for severity in STYLES}
    plurals = {"error": "errors", "warning": "warnings", "info": "notes"}
    singulars = {"error": "error", "warning": "warning", "info": "note"}
    return ", ".join(f"{n} {singulars[s] if n == 1 else plurals[s]}" for s, n in counts.items() if n)
