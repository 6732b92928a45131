"""The card of an incident, on the terminal at the moment of failure. Plain text where nobody looks.

It goes to stderr: stdout belongs to the script.
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ampguard.incident import CAUSES, Fix, Incident, Location
from ampguard.report.console import stderr_console
from ampguard.report.numbers import readable_number
from ampguard.report.summary import STYLES, short_path

_VERDICTS = {True: ("fix, verified", "green"), False: ("fix, not enough", "yellow"), None: ("fix, untried", "cyan")}
SENTENCE_STARTS = frozenset(["The", "A", "An", "In", "With", "Weights", "What", "No", "Each", "After"])
_MAX_WIDTH = 100
_MAX_KEY_NUMBERS = 4
_NO_NUMBERS = frozenset(
    {"kind", "element", "rung", "not_replayed_because", "name", "role", "message"}
    | {"last_step", "since_step", "later_failures_caused_by_it", "hidden", "hidden_op", "derivative_of"}
)
"""Evidence that is for programs, or is said elsewhere on the card."""


def print_incident(incident: Incident, console: Console | None = None) -> None:
    """Print the card of one incident. A closed or broken stderr is no reason to disturb a training."""
    _print([Text(), incident_card(incident), Text()], console)


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
        style = STYLES[incident.severity]
        what, numbers, more = _told_in_three(incident)
        heading = Text.assemble((f"{incident.severity}[{incident.cause}]", style), (f" {_when(incident)}: ", "bold"))
        yield from _folded(heading, what, width, indent=2)
        yield from _where(incident, width)
        if incident.severity == "info":  # normal operation: a note, and the rest for those who ask
            yield Text.assemble("no need to act; more: ", (f"ampguard explain {incident.cause}", "bold"))
            return
        yield from _code_and_numbers(incident, numbers, style, width)
        for paragraph in (*more.splitlines(), *_what_it_rests_on(incident)):
            yield from (Text(line) for line in _wrapped(paragraph, width))
        for fix in incident.fixes:
            yield from _fix_lines(fix, width, incident.phase not in ("protocol", "optimizer"))
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
    inside = f" in {location.full_name}" if location.function else ""
    return f"{short_path(location.file)}:{location.line}{inside}"


def _model_place(incident: Incident) -> str:
    parts = []
    if incident.module is not None:
        parts.append(f"module {incident.module}" if incident.module else "the root module")
    if incident.op is not None:
        parts.append(incident.op.removesuffix(".default"))
    if incident.dtype is not None:
        parts.append(incident.dtype)
    return f"({', '.join(parts)})" if parts else ""


def _told_in_three(incident: Incident) -> tuple[str, str, str]:
    """The explanation, each part said once: what happened (the headline), its numbers (beside the mark), the rest.

    The first sentence is cut at its colon. One that has none says the numbers itself; the mark then takes what the
    evidence adds to it.
    """
    if not incident.explanation.strip():
        return CAUSES.get(incident.cause, incident.cause), _key_numbers(incident), ""
    first, *others = re.split(r"(?<=[.!?])\s+(?=[A-Z`'\"])", incident.explanation.strip(), maxsplit=1)
    what, _, numbers = first.removesuffix(".").partition(": ")
    article, _, after = what.partition(" ")
    if article in SENTENCE_STARTS:
        what = f"{article.lower()} {after}"
    return what, numbers or _key_numbers(incident), "".join(others)


def _what_it_rests_on(incident: Incident) -> Iterator[str]:
    """Said where the answer is not from an exact replay of the failing step, the usual ground."""
    rung = incident.evidence.get("rung", "replay")
    reason = incident.evidence.get("not_replayed_because")
    if rung == "live-trace":
        why = f" ({reason})" if reason else ""
        yield f"Seen while the step ran; an earlier failure could not be replayed{why}, so no fix was tried."
    elif rung == "replay-inexact":
        yield "The replay was not bit for bit the step itself; its failure was the same."
    elif rung != "replay":
        yield f"This rests on: {rung}."


def _code_and_numbers(incident: Incident, numbers: str, style: str, width: int) -> Iterator[Text]:
    """The line as it stands in the file, a mark under what it computes, and the numbers beside the mark."""
    location = incident.location
    if location is None or not location.code.strip():
        yield from (Text(f"      {line}") for line in _wrapped(numbers, width - 6))
        return
    code = location.code.splitlines()[0].rstrip().expandtabs(4)
    gutter = " " * len(str(location.line))
    start, length = _expression_span(code, incident.op)
    mark = Text.assemble((f"{gutter} | ", "blue"), " " * start, ("^" * length, style))
    yield Text.assemble((f"{location.line} | ", "blue"), code)
    if len(mark) + 1 + len(numbers) <= width:
        yield mark + Text(f" {numbers}".rstrip())
        return
    yield mark
    margin = len(gutter) + 3 + start
    if len(numbers) > width - margin:  # beside the margin rather than folded in a narrow column
        margin = len(gutter) + 3
    indent = " " * (margin - len(gutter) - 3)
    for line in _wrapped(numbers, max(20, width - margin)):
        yield Text.assemble((f"{gutter} | ", "blue"), indent + line)


def _expression_span(code: str, op: str | None = None) -> tuple[int, int]:
    """Where the line computes: the value of an assignment or a return, else the whole statement.

    Of several statements the one that has the operator in it; the whole line where that cannot be told.
    """
    stripped = code.lstrip()
    margin = len(code) - len(stripped)
    node = _computing(stripped, op)
    if node is None or node.end_col_offset is None:  # the line goes on in the next one
        begin = _VALUE_BEGINS.match(stripped)
        before = begin.end() if begin is not None else 0
        return margin + before, max(1, len(stripped) - before)
    begins = len(stripped.encode()[: node.col_offset].decode())  # ast counts bytes
    inside = stripped.encode()[node.col_offset : node.end_col_offset].decode()
    return margin + begins, max(1, len(inside))


def _whole(line: str) -> ast.Pass:
    """A statement as long as the line."""
    return ast.Pass(lineno=1, col_offset=0, end_lineno=1, end_col_offset=len(line.encode()))


_WITH_A_BODY = (ast.If, ast.For, ast.While, ast.With, ast.FunctionDef)

_SIGNS: dict[str, type[ast.operator]] = {
    "div": ast.Div,
    "mul": ast.Mult,
    "add": ast.Add,
    "sub": ast.Sub,
    "rsub": ast.Sub,
    "pow": ast.Pow,
    **dict.fromkeys(("mm", "bmm", "addmm", "mv", "dot", "baddbmm"), ast.MatMult),
}
"""What an operator of PyTorch's is written as."""


def _is_in(op: str, statement: ast.stmt) -> bool:
    """Whether an operator (`aten.log.default`) is written in a statement, as a sign or by its name."""
    name = op.split(".")[1].strip("_") if "." in op else op
    for node in ast.walk(statement):
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, _SIGNS.get(name, ())):
            return True
        if isinstance(node, (ast.Attribute, ast.Name)):
            written = node.attr if isinstance(node, ast.Attribute) else node.id
            if written.strip("_") == name:
                return True
    return False


_VALUE_BEGINS = re.compile(r"return\s+|[^=()]*[^=!<>()]=(?!=)\s*")


def _computing(line: str, op: str | None) -> ast.expr | ast.stmt | None:
    """The part of a line that computes; None where it is no statement by itself, or where it cannot be told."""
    with contextlib.suppress(SyntaxError, ValueError, IndexError):
        statements = ast.parse(line).body
        while isinstance(statements[-1], _WITH_A_BODY):  # `if bad: loss = ...` on one line
            statements = statements[-1].body
        if len(statements) > 1:
            statements = [statement for statement in statements if op is not None and _is_in(op, statement)]
            if len(statements) != 1:
                return _whole(line)
        value = getattr(statements[0], "value", None)
        return value if isinstance(value, ast.expr) else statements[0]
    with contextlib.suppress(SyntaxError, ValueError, IndexError):
        head = ast.parse(f"{line} pass").body[0]  # of a block
        if isinstance(head, ast.With):
            return head.items[0].context_expr
        return getattr(head, "test", None) or getattr(head, "iter", None)
    return None


def _key_numbers(incident: Incident) -> str:
    """The evidence in short: the first few plain values that the explanation does not hold."""
    facts = {key: value for key, value in incident.evidence.items() if key not in _NO_NUMBERS and _is_plain(value)}
    new = [f"{k.replace('_', ' ')} {readable_number(v)}" for k, v in facts.items() if not _is_told(v, incident)]
    return ", ".join(new[:_MAX_KEY_NUMBERS])


def _is_told(value: Any, incident: Incident) -> bool:
    """Whether the explanation holds this value, written its own way (`-1e+09` for -999999999.0)."""
    if isinstance(value, str):
        return value in incident.explanation
    numbers = re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", incident.explanation)
    return not isinstance(value, bool) and any(math.isclose(float(n), value, rel_tol=1e-3) for n in numbers)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and 0 < len(value) <= 24)


_PLACED = re.compile(r"  # [^\s:]+:\d+$")
"""A changed line that is not the one shown above it."""


def _fix_lines(fix: Fix, width: int, can_be_replayed: bool) -> Iterator[Text]:
    """One fix. What a replay cannot show (the order of calls) is not called untried."""
    label, style = _VERDICTS[fix.verified] if fix.verified is not None or can_be_replayed else ("fix", "cyan")
    if fix.verified is None and fix.outcome:  # a replay has shown something, and not that it helps
        label = "fix, in doubt"
    first, *rest = fix.how.splitlines() or [fix.action]
    if len(label) + 2 + len(first) > width:
        first, place, where = first.partition("  # ") if _PLACED.search(first) else (first, "", "")
        first, *code = _words_and_code(first, fix.action)
        if place and code and len(code[-1]) + len(where) + 8 <= width:
            code[-1] += f"  # {where}"
        elif place:
            code.append(f"# {where}")
        rest = [*code, *rest]
    if first:
        yield from _folded(Text(f"{label}: ", style), first, width, indent=4)
    else:
        yield Text(f"{label}:", style)
    yield from (Text(f"    {line}") for line in rest)
    if fix.outcome:
        yield from _folded(Text("    -> ", "dim"), fix.outcome, width, indent=7)


_FIRST_COLON = re.compile(r"((?:`[^`]*`|:(?! )|[^:`])*): (.*)", re.DOTALL)
"""Not one within the code that a sentence quotes."""


def _words_and_code(how: str, action: str) -> list[str]:
    """`how` cut after its first colon where code follows, before it where all is code: code has its own lines, never folded."""
    if action != "force-fp32" and _is_code(how):
        return ["", how]
    found = _FIRST_COLON.match(how)
    if found is None or not any(c in found[2] for c in "()=["):
        return [how]
    words, code = found.groups()
    return [f"{words}:", *(code.split("; ") if action == "force-fp32" else [code])]


def _is_code(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _folded(head: Text, tail: str, width: int, indent: int) -> Iterator[Text]:
    """`head` and `tail` on one line if they fit, else folded, with the continuation indented."""
    placeholder = "x" * len(head)
    first, *rest = _wrapped(tail, width, placeholder, " " * indent) or [placeholder]
    if len(first) < len(head):  # the first word of the tail did not fit beside the head
        first = placeholder
    yield head + Text(first[len(head) :])
    yield from (Text(line) for line in rest)


def _wrapped(text: str, width: int, first_indent: str = "", indent: str = "") -> list[str]:
    """Folded between words only: names, paths and `non-finite` stay whole."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first_indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
