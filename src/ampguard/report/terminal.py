"""Incidents on the terminal: a card at the moment of failure, a summary at the end. Plain text where nobody looks.

Both go to stderr: stdout belongs to the script.
"""

from __future__ import annotations

import ast
import contextlib
import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ampguard.incident import CAUSES, Fix, Incident, Location, Report, Severity
from ampguard.report.numbers import readable_number

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}
_VERDICTS = {True: ("fix, verified", "green"), False: ("fix, not enough", "yellow"), None: ("fix, untried", "cyan")}
_MAX_WIDTH = 100
_MAX_KEY_NUMBERS = 4
_MAX_SUMMARY_LINES = 20


def stderr_console() -> Console:
    """A console on stderr: colours on a terminal, plain text elsewhere; nothing in our texts is markup."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def print_incident(incident: Incident, console: Console | None = None) -> None:
    """Print the card of one incident. A closed or broken stderr is no reason to disturb a training."""
    _print([Text(), incident_card(incident), Text()], console)


def print_summary(report: Report, path: Path | None, console: Console | None = None) -> None:
    """Print how the run went, one line per incident, and where the report is (`path` is None if it is nowhere)."""
    _print(list(_summary_lines(report, path)), console)


def incident_card(incident: Incident) -> IncidentCard:
    """The incident as something rich can print, at any width."""
    return IncidentCard(incident)


class IncidentCard:
    """One incident: what happened, where, with which numbers, what to do, where to read more."""

    def __init__(self, incident: Incident) -> None:
        self.incident = incident

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.lines(min(options.max_width, _MAX_WIDTH))

    def lines(self, width: int) -> Iterator[Text]:
        incident = self.incident
        style = _STYLES[incident.severity]
        meaning = CAUSES.get(incident.cause, incident.cause)
        heading = Text.assemble((f"{incident.severity}[{incident.cause}]", style), (f" {_when(incident)}: ", "bold"))
        yield from _folded(heading, meaning, width, indent=2)
        yield from _where(incident, width)
        yield from _code_and_numbers(incident, style, width)
        for paragraph in incident.explanation.splitlines():
            yield from (Text(line) for line in textwrap.wrap(paragraph, width, break_long_words=False))
        for fix in incident.fixes:
            yield from _fix_lines(fix, width)
        yield Text.assemble("more: ", (f"ampguard explain {incident.cause}", "bold"))


def _print(lines: Sequence[Text | IncidentCard], console: Console | None) -> None:
    console = stderr_console() if console is None else console
    with contextlib.suppress(OSError, ValueError):
        for line in lines:
            if isinstance(line, IncidentCard):
                _print(list(line.lines(min(console.width, _MAX_WIDTH))), console)
            else:
                # Paths and code are never broken: they are there to be clicked and copied.
                console.print(line, soft_wrap=True)


def _when(incident: Incident) -> str:
    words = [f"step {incident.step}"]
    if incident.mode == "eval":
        words.append("eval")
    words.append(incident.phase)
    ranks = incident.evidence.get("ranks")
    if ranks:
        words.append(f"ranks {', '.join(str(rank) for rank in ranks)}")
    elif incident.rank:
        words.append(f"rank {incident.rank}")
    if incident.occurrences > 1:
        words.append(f"seen {incident.occurrences} times")
    return ", ".join(words)


def _where(incident: Incident, width: int) -> Iterator[Text]:
    parts = [part for part in (_place(incident.location), _model_place(incident)) if part]
    together = "   ".join(parts)
    lines = [together] if together and len(together) + 6 <= width else parts
    for line, arrow in zip(lines, ("  --> ", "      "), strict=False):
        yield Text.assemble((arrow, "blue"), line)


def _place(location: Location | None) -> str:
    if location is None:
        return ""
    inside = f" in {location.function}" if location.function else ""
    return f"{short_path(location.file)}:{location.line}{inside}"


def _line_of(location: Location | None) -> str:
    return f"{Path(location.file).name}:{location.line}" if location is not None else ""


def _model_place(incident: Incident) -> str:
    parts = []
    if incident.module is not None:
        parts.append(f"module {incident.module}" if incident.module else "the root module")
    if incident.op is not None:
        parts.append(incident.op.removesuffix(".default"))
    if incident.dtype is not None:
        parts.append(incident.dtype)
    return f"({', '.join(parts)})" if parts else ""


def short_path(file: str) -> str:
    """`file` relative to the working directory where it lies inside, else as it is."""
    with contextlib.suppress(OSError, ValueError):
        relative = os.path.relpath(file)
        if not relative.startswith(os.pardir):
            return relative
    return file


def _code_and_numbers(incident: Incident, style: str, width: int) -> Iterator[Text]:
    """The line as it stands in the file, a mark under what it computes, and the numbers beside the mark."""
    numbers = _key_numbers(incident)
    location = incident.location
    if location is None or not location.code.strip():
        yield from (Text(f"      {line}") for line in textwrap.wrap(numbers, width - 6))
        return
    code = location.code.splitlines()[0].rstrip().expandtabs(4)
    gutter = " " * len(str(location.line))
    start, length = _expression_span(code)
    mark = Text.assemble((f"{gutter} | ", "blue"), " " * start, ("^" * length, style))
    yield Text.assemble((f"{location.line} | ", "blue"), code)
    if len(mark) + 1 + len(numbers) <= width:
        yield mark + Text(f" {numbers}".rstrip())
        return
    yield mark
    room = max(20, width - len(gutter) - 3)
    yield from (Text.assemble((f"{gutter} | ", "blue"), line) for line in textwrap.wrap(numbers, room))


def _expression_span(code: str) -> tuple[int, int]:
    """Where the line computes: the value of an assignment or a return, else the whole statement."""
    stripped = code.lstrip()
    margin = len(code) - len(stripped)
    try:
        statement = ast.parse(stripped).body[0]
    except (SyntaxError, IndexError, ValueError):
        return margin, 1
    while isinstance(statement, (ast.If, ast.For, ast.While, ast.With)):  # `if bad: loss = ...` on one line
        statement = statement.body[-1]
    value = getattr(statement, "value", None)
    node = value if isinstance(value, ast.expr) else statement
    if not isinstance(node, (ast.expr, ast.stmt)) or node.end_col_offset is None:
        return margin, 1
    before = stripped.encode()[: node.col_offset].decode()  # ast counts bytes
    inside = stripped.encode()[node.col_offset : node.end_col_offset].decode()
    return margin + len(before), max(1, len(inside))


def _key_numbers(incident: Incident) -> str:
    """The evidence in short: the first few plain values. The rest is in the report."""
    usual = {"rung": "replay"}  # said only where it is another
    plain = {key: value for key, value in incident.evidence.items() if _is_plain(value) and usual.get(key) != value}
    shown = list(plain.items())[:_MAX_KEY_NUMBERS]
    return ", ".join(f"{key.replace('_', ' ')} {readable_number(value)}" for key, value in shown)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and 0 < len(value) <= 24)


def _fix_lines(fix: Fix, width: int) -> Iterator[Text]:
    label, style = _VERDICTS[fix.verified]
    first, *rest = fix.how.splitlines() or [fix.action]
    yield from _folded(Text(f"{label}: ", style), first, width, indent=4)
    yield from (Text(f"    {line}") for line in rest)
    if fix.outcome:
        yield from _folded(Text("    -> ", "dim"), fix.outcome, width, indent=7)


def _folded(head: Text, tail: str, width: int, indent: int) -> Iterator[Text]:
    """`head` and `tail` on one line if they fit, else folded, with the continuation indented."""
    first, *rest = textwrap.wrap(
        tail, width, initial_indent="x" * len(head), subsequent_indent=" " * indent, break_long_words=False
    ) or ["x" * len(head)]
    if len(first) < len(head):  # the first word of the tail did not fit beside the head
        first = "x" * len(head)
    yield head + Text(first[len(head) :])
    yield from (Text(line) for line in rest)


def _summary_lines(report: Report, path: Path | None) -> Iterator[Text]:
    steps = "1 step" if report.steps == 1 else f"{report.steps} steps"
    outcome = _count(report.incidents) or "no incident"
    style = "bold green" if report.status == "clean" else "bold"
    yield Text.assemble(("ampguard: ", style), f"{steps}, ", (outcome, style))
    for incident in report.incidents[:_MAX_SUMMARY_LINES]:
        seen = f" (seen {incident.occurrences} times)" if incident.occurrences > 1 else ""
        place = incident.module or _line_of(incident.location)
        yield Text.assemble(
            "  ",
            (f"{incident.severity:<8}", _STYLES[incident.severity]),
            f"{incident.cause:<21} step {incident.step:<6} {place}{seen}".rstrip(),
        )
    if len(report.incidents) > _MAX_SUMMARY_LINES:
        yield Text(f"  and {len(report.incidents) - _MAX_SUMMARY_LINES} more")
    if path is not None:
        yield Text(f"report: {short_path(str(path))}")


def _count(incidents: Sequence[Incident]) -> str:
    counts = {severity: sum(i.severity == severity for i in incidents) for severity in _STYLES}
    plurals = {"error": "errors", "warning": "warnings", "info": "notes"}
    singulars = {"error": "error", "warning": "warning", "info": "note"}
    return ", ".join(f"{n} {singulars[s] if n == 1 else plurals[s]}" for s, n in counts.items() if n)
