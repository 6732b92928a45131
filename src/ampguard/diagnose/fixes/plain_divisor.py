"""A divisor that is a plain Python number and 0 (`loss / n`, with n from `.item()` or `len`): the fix, as code and as tried."""

from __future__ import annotations

import ast
from typing import Any

from ampguard.diagnose import words
from ampguard.diagnose.code import accused, rewrite
from ampguard.diagnose.code import source as source_code
from ampguard.diagnose.code.text import Edit
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Proposal
from ampguard.diagnose.fixes.proposals import smallest_epsilon
from ampguard.diagnose.fixes.shared_divisor import counts_by_its_text, is_plain_zero
from ampguard.replay.variants import Variant


def at_least(evidence: Evidence) -> Proposal:
    """`max(n, 1)` for a count; `(w or 1)` where a sum of weights is 0 as well (0/0), which at other times may be any
    number; else `max(t, 1e-6)`.
    """
    is_whole = evidence.call is not None and any(is_plain_zero(a) and isinstance(a, int) for a in evidence.call.args)
    is_whole = is_whole or counts_by_its_text(evidence)
    is_count = is_whole or evidence.is_of_nothing or (bool(evidence.operands) and evidence.operands[0].value == 0)
    least = 1.0 if is_count else smallest_epsilon(evidence)
    change = _or_one if is_count and not is_whole else _larger_of(least)

    def guarded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*(least if is_plain_zero(argument) else argument for argument in args), **kwargs)

    short = "(w or 1)" if change is _or_one else f"max(n, {rewrite.literal(least)})"
    how = _written(evidence, change) or f"{short} in place of the divisor in: {accused.statement(evidence)}"
    action = "guard-empty" if is_count else "clamp"
    return Proposal(action, words.region(evidence), how, trial=lambda e: Variant(at_places={e.op.place: guarded}))


def _written(evidence: Evidence, change: rewrite.Change) -> str | None:
    """The changed line, where the text tells which division it was."""
    line, op = accused.line_of(evidence), evidence.op
    if line is None:
        return None
    expressions = line.expressions(op.short_name, accused.is_in_place(op))
    turn = accused.turn_of(evidence, expressions)
    able = [
        (expression, divisor)
        for expression in (expressions if turn is None else [expressions[turn]])
        if (divisor := expression.operand(op.short_name, 1, accused.argument_name(op, 1))) is not None
        and source_code.plain_number(divisor) in (None, 0)
    ]
    return rewrite.with_changes(line, able, change) if len(able) == 1 else None


def _larger_of(least: float) -> rewrite.Change:
    def change(source: source_code.Source, operand: ast.expr, expression: source_code.Expression) -> list[Edit]:
        around = None if expression.takes_any(operand) else source.in_parentheses(operand)
        start, end = around or source.span(operand)
        return [(start, end, f"max({source.written(operand)}, {rewrite.literal(least)})")]

    return change


def _or_one(source: source_code.Source, operand: ast.expr, expression: source_code.Expression) -> list[Edit]:
    text = source.written(operand)
    if isinstance(operand, (ast.IfExp, ast.Lambda, ast.NamedExpr)):
        text = f"({text})"
    is_alone = expression.takes_any(operand)
    start, end = source.span(operand) if is_alone else source.in_parentheses(operand) or source.span(operand)
    return [(start, end, f"{text} or 1" if is_alone else f"({text} or 1)")]
