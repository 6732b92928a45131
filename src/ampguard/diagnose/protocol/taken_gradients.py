"""What to write behind `torch.autograd.grad(scaler.scale(loss), ...)`, so that what it returns carries no scale.

It returns a tuple. A script keeps that, takes one tensor out of it or unpacks it: the division has to fit.
"""

from __future__ import annotations

import ast

from ampguard.capture.protocol.script_source import calls_at, function_of
from ampguard.capture.record import Line

FACTOR = "inv_scale"
GENERAL = f"gradients = [g * {FACTOR} for g in gradients]"


def division_of(line: Line | None) -> str:
    """The code that multiplies by `inv_scale` what the call at this line returns, as the statement there keeps it."""
    function = function_of(line.code) if line is not None else None
    calls = calls_at(function, line.number, {"grad"}) if function is not None and line is not None else ()
    if function is None or len(calls) != 1:
        return GENERAL
    parents = {id(inner): node for node in ast.walk(function) for inner in ast.iter_child_nodes(node)}
    return _division(calls[0], parents)


def _division(call: ast.Call, parents: dict[int, ast.AST]) -> str:
    taken: ast.expr = call
    written = f"{ast.unparse(call.func)}(...)"
    around = parents[id(call)]
    is_one = isinstance(around, ast.Subscript) and not isinstance(around.slice, ast.Slice)
    if isinstance(around, ast.Subscript):
        taken, written = around, f"{written}[{ast.unparse(around.slice)}]"
    each = f"g * {FACTOR}" if not _may_be_none(call) else f"None if g is None else g * {FACTOR}"
    target = _target(taken, parents[id(taken)])
    if isinstance(target, (ast.Tuple, ast.List)) and not is_one:
        if any(isinstance(item, ast.Starred) for item in target.elts):
            return f"[{each} for g in {written}] in place of {written}"
        names = [ast.unparse(item) for item in target.elts]
        return f"{', '.join(names)} = {', '.join(f'{name} * {FACTOR}' for name in names)}"
    if isinstance(target, (ast.Name, ast.Attribute)):
        name = ast.unparse(target)
        return f"{name} = {name} * {FACTOR}" if is_one else f"{name} = [{each} for g in {name}]"
    return (
        f"({written} * {FACTOR}) in place of {written}"
        if is_one
        else f"[{each} for g in {written}] in place of {written}"
    )


def _target(value: ast.expr, statement: ast.AST) -> ast.expr | None:
    """What the value is assigned to, all of it."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return statement.targets[0]
    return statement.target if isinstance(statement, ast.AnnAssign) and statement.value is value else None


def _may_be_none(call: ast.Call) -> bool:
    return any(k.arg == "allow_unused" and getattr(k.value, "value", True) for k in call.keywords)
