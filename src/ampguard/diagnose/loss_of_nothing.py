"""`F.cross_entropy` over targets that are all ignored, written so that it is 0 in place of 0/0."""

from __future__ import annotations

import ast

from ampguard.diagnose import source_code
from ampguard.diagnose.code_text import joined_lines, spliced
from ampguard.diagnose.evidence import Evidence

CALLS = frozenset({"cross_entropy", "nll_loss"})
USUAL_IGNORED = "-100"


def averaged_by_hand(evidence: Evidence) -> str | None:
    """The line with the sum of the losses divided by the number of targets that count, at least 1.

    None where the line has no such call of its own, or one that weights classes, smooths labels or does not average.
    """
    line = source_code.line_of_code(evidence.op.line) if evidence.op.line is not None else None
    if line is None:
        return None
    calls = [
        (call, statement)
        for part, statement in line.parts
        for call in ast.walk(part)
        if isinstance(call, ast.Call) and source_code.called_name(call) in CALLS
    ]
    if len(calls) != 1:
        return None
    call, statement = calls[0]
    named = {k.arg: k.value for k in call.keywords}
    if len(call.args) != 2 or not named.keys() <= {"ignore_index"}:
        return None
    source = line.source
    ignored = source.written(named["ignore_index"]) if named else USUAL_IGNORED
    start, end = source.span(call)
    target = source.written(call.args[1])
    edits = [
        (start, start, "("),
        (end - 1, end - 1, ', reduction="sum"'),
        (end, end, f" / ({target} != {ignored}).sum().clamp(min=1))"),
    ]
    is_short = statement is not None and statement.lineno == statement.end_lineno
    shown: ast.expr | ast.stmt = statement if statement is not None and is_short else call
    return joined_lines(spliced(source.text, *source.span(shown), edits))
