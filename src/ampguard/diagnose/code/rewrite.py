"""The user's line with a fix in it: `torch.log(p)` becomes `torch.log(p.clamp(min=1e-6))`, the rest stays as written."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable

import torch

from ampguard.diagnose.code.source import Expression, LineOfCode, Source, called, plain_number, shown
from ampguard.diagnose.code.text import Edit, joined_lines, spliced

PRIMARY = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
LOOSE = (ast.IfExp, ast.Lambda, ast.BoolOp, ast.Compare, ast.NamedExpr)
BITWISE = (ast.BitOr, ast.BitAnd, ast.BitXor, ast.LShift, ast.RShift)
LOWEST = {"float32": torch.finfo(torch.float32).min, "bfloat16": torch.finfo(torch.bfloat16).min}
Change = Callable[[Source, ast.expr, Expression], list[Edit]]
"""The edits for an operand of an expression."""


def with_changes(line: LineOfCode, changes: list[tuple[Expression, ast.expr]], change: Change) -> str:
    """The statement with the operands changed; the changed expressions alone where it spans several lines."""
    regions: dict[tuple[int, int], list[Edit]] = {}
    for expression, operand in changes:
        edits = change(line.source, operand, expression)
        regions.setdefault(line.source.span(shown(expression.node, expression.statement)), []).extend(edits)
    return "; ".join(joined_lines(spliced(line.source.text, *span, edits)) for span, edits in regions.items())


def with_constant(line: LineOfCode, value: float, text: str) -> str | None:
    """The statement with a constant (`-1e9`, `torch.finfo(torch.float32).min`) replaced; None where it is not written there."""
    for part, statement in line.parts:
        found = [n for n in ast.walk(part) if isinstance(n, ast.expr) and _is_constant(n, value)]
        if found and statement is not None:
            edits = [(*line.source.span(node), text) for node in found]
            return joined_lines(spliced(line.source.text, *line.source.span(statement), edits))
    return None


def _is_constant(node: ast.expr, value: float) -> bool:
    if math.isinf(value):
        return _is_infinity(node, value)
    if isinstance(node, ast.Attribute) and node.attr == "min" and isinstance(node.value, ast.Call):
        dtype = ast.unparse(node.value.args[0]).rpartition(".")[2] if len(node.value.args) == 1 else ""
        return "finfo" in called(node.value) and LOWEST.get(dtype) == value
    return plain_number(node) == value


def _is_infinity(node: ast.expr, value: float) -> bool:
    """`float("-inf")`, `-torch.inf`, `-math.inf`, `-float("inf")`."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _is_infinity(node.operand, -value)
    if isinstance(node, ast.Attribute):
        return value > 0 and node.attr.lower() in ("inf", "infinity") and isinstance(node.value, ast.Name)
    if not isinstance(node, ast.Call) or called(node) != {"float"} or len(node.args) != 1:
        return False
    text = node.args[0]
    if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
        return False
    spelled = text.value.strip().lower().lstrip("+")
    return spelled.lstrip("-") in ("inf", "infinity") and spelled.startswith("-") == (value < 0)


def plus(epsilon: float | str, is_dead: Callable[[float], bool] = lambda value: False) -> Change:
    """`d` -> `d + 1e-6`. An epsilon that the precision loses (`is_dead`) is replaced in place of adding a second one."""
    added = epsilon if isinstance(epsilon, str) else literal(epsilon)

    def change(source: Source, operand: ast.expr, expression: Expression) -> list[Edit]:
        if expression.writes(operand):
            return _before(source, operand, expression, f".add_({added})")
        if isinstance(operand, ast.BinOp) and isinstance(operand.op, ast.Add):
            for side in (operand.right, operand.left):
                value = plain_number(side)
                if value is not None and is_dead(value):
                    return [(*source.span(side), added)]
        start, end = source.span(operand)
        loose = isinstance(operand, LOOSE) or (isinstance(operand, ast.BinOp) and isinstance(operand.op, BITWISE))
        stands = expression.takes_any(operand) or source.in_parentheses(operand) is not None
        opening, closing = "(" * (loose + (not stands)), ")" * (not stands)
        return [(start, start, opening), (end, end, f"{')' * loose} + {added}{closing}")]

    return change


def clamped(low: float | None, high: float | None) -> Change:
    """`p` -> `p.clamp(min=1e-6)`. A looser bound that is written there already is replaced."""
    bounds = {n: b for n, b in (("min", low), ("max", high)) if b is not None}
    written_bounds = f"({', '.join(f'{n}={literal(b)}' for n, b in bounds.items())})"
    call = f".clamp{written_bounds}"

    def change(source: Source, operand: ast.expr, expression: Expression) -> list[Edit]:
        if expression.writes(operand):
            return _before(source, operand, expression, f".clamp_{written_bounds}")
        written = _bounds_of(operand)
        if all(n in written and (written[n][1] < b) == (n == "min") for n, b in bounds.items()):
            return [(*source.span(written[n][0]), literal(b)) for n, b in bounds.items()]
        start, end = source.span(operand)
        if isinstance(operand, PRIMARY):
            return [(end, end, call)]
        around = None if expression.takes_any(operand) else source.in_parentheses(operand)
        return [(around[1], around[1], call)] if around is not None else [(start, start, "("), (end, end, f"){call}")]

    return change


def clamped_result(bound: str) -> Change:
    """`a * b` -> `(a * b).clamp(min=-1e4)`: of the whole expression, whatever it stands in."""

    def change(source: Source, node: ast.expr, expression: Expression) -> list[Edit]:
        start, end = source.span(node)
        opening, closing = ("", "") if isinstance(node, PRIMARY) else ("(", ")")
        return [(start, start, opening), (end, end, f"{closing}.clamp({bound})")]

    return change


def masked(condition: str, inside: float) -> Change:
    """`d` -> `torch.where(d > 0, d, 1.0)`, where the condition is `{} > 0`. An operand that calls something runs once."""

    def change(source: Source, operand: ast.expr, expression: Expression) -> list[Edit]:
        start, end = source.span(operand)
        written = source.written(operand)
        if not called(operand):
            tested = written if isinstance(operand, PRIMARY) else f"({written})"
        else:
            name = unused_name(source, "safe")
            tested, written = f"({name} := {written})", name
        return [(start, end, f"torch.where({condition.format(tested)}, {written}, {inside})")]

    return change


def unused_name(source: Source, wanted: str) -> str:
    """A name that the source does not use yet."""
    taken = {n.id for n in ast.walk(source.tree) if isinstance(n, ast.Name)}
    taken |= {n.arg for n in ast.walk(source.tree) if isinstance(n, ast.arg)}
    return next(name for name in (wanted, "operand", *(f"operand_{i}" for i in range(2, 99))) if name not in taken)


def _before(source: Source, operand: ast.expr, expression: Expression, call: str) -> list[Edit]:
    """A change in place of what the expression then writes to: `x.sqrt_()` -> `x.add_(1e-6).sqrt_()`."""
    start, end = source.span(operand)
    if isinstance(expression.node, ast.AugAssign):
        return [(start, start, f"{source.text[start:end].decode()}{call}; ")]
    return [(end, end, call)]


def on_device(device: str) -> str:
    """The argument by which a printed `torch.eye(3)` is made where the tensors are that it is added to.

    >>> "torch.eye(3" + on_device("cuda") + ")", "torch.eye(3" + on_device("cpu") + ")"
    ('torch.eye(3, device="cuda")', 'torch.eye(3)')
    """
    return "" if device == "cpu" else f', device="{device}"'


def literal(value: float) -> str:
    """A number as one would type it.

    >>> literal(1e-6), literal(1e30), literal(80.0), literal(1.000001), literal(1e9), literal(-65504.0)
    ('1e-6', '1e30', '80', '1.000001', '1e9', '-65504')
    """
    texts = (re.sub(r"e([+-])0*", lambda m: "e-" if m[1] == "-" else "e", t) for t in (f"{value:.10g}", f"{value:.9e}"))
    plain, scientific = (re.sub(r"\.?0+(?=e)", "", t) if "e" in t else t for t in texts)
    return scientific if len(scientific) < len(plain) - 3 else plain


def _bounds_of(node: ast.expr) -> dict[str, tuple[ast.expr, float]]:
    """The numbers written in `x.clamp(min=1e-8)`, `x.clamp(1e-8)`, `x.clamp_min(1e-8)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return {}
    places = {"clamp": ("min", "max"), "clip": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}
    names = places.get(node.func.attr, ())
    arguments = list(zip(names, node.args, strict=False)) + [(k.arg, k.value) for k in node.keywords]
    return {
        name: (value, number)
        for name, value in arguments
        if name in names and (number := plain_number(value)) is not None
    }
