"""Functions of PyTorch that take the epsilon of their division as an argument: `F.normalize(x, eps=1e-12)`.

The division itself is on no line of the user's: the argument is what can be changed.
"""

from __future__ import annotations

import ast
from typing import Any

from torch import Tensor

from ampguard.diagnose import words
from ampguard.diagnose.code import rewrite
from ampguard.diagnose.code import source as source_code
from ampguard.diagnose.code.text import joined_lines, spliced
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Proposal
from ampguard.diagnose.locate import lineage
from ampguard.replay.variants import Variant

CALLS = {"normalize": 3, "cosine_similarity": 3}
"""By the name of the function, where `eps` stands among its arguments."""


def larger_eps(evidence: Evidence, epsilon: float) -> Proposal | None:
    """The line with an epsilon that survives, where the divisor is a norm that such a call keeps above its own."""
    op = evidence.op
    divisor = lineage.maker(evidence.trace, op, 1) if op.short_name == "div" else None
    line = source_code.line_of_code(op.line) if op.line is not None else None
    if divisor is None or divisor.short_name not in ("clamp_min", "clamp") or line is None:
        return None
    found = [
        (call, statement)
        for part, statement in line.parts
        for call in ast.walk(part)
        if isinstance(call, ast.Call) and _name(call) in CALLS
    ]
    if len(found) != 1:
        return None
    call, statement = found[0]
    edit = _edit(line.source, call, rewrite.literal(epsilon))
    shown: ast.expr | ast.stmt = statement if statement is not None and _is_short(statement) else call
    how = joined_lines(spliced(line.source.text, *line.source.span(shown), [edit]))

    def bounded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_tensor = len(args) > 1 and isinstance(args[1], Tensor)
        return func(args[0], args[1].clamp(min=epsilon), *args[2:], **kwargs) if is_tensor else func(*args, **kwargs)

    return Proposal("add-epsilon", words.region(evidence), how, trial=lambda e: Variant(at_places={op.place: bounded}))


def _name(call: ast.Call) -> str:
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _edit(source: source_code.Source, call: ast.Call, epsilon: str) -> tuple[int, int, str]:
    """The written epsilon replaced, or one put behind the other arguments."""
    given = next((k.value for k in call.keywords if k.arg == "eps"), None)
    at = CALLS[_name(call)]
    given = given if given is not None or len(call.args) <= at else call.args[at]
    if given is not None:
        return (*source.span(given), epsilon)
    end = source.span(call)[1] - 1
    return (end, end, f", eps={epsilon}")


def _is_short(statement: ast.stmt) -> bool:
    return statement.lineno == statement.end_lineno
