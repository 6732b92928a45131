"""What a name stands for in a line of code: the expression that was assigned to it, where the text leaves no doubt."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeAlias

from torch import Tensor

from ampguard.diagnose.code.source import Source

DRAWING = ("rand", "sample", "dropout", "bernoulli", "normal", "uniform", "exponential")
"""Parts of the names of functions that draw random numbers."""

Assignment: TypeAlias = ast.Assign | ast.AnnAssign

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def assigned_to(source: Source, name: str, line: int, is_checked: bool = True) -> ast.expr | None:
    """The expression that was assigned to a name and that would give the same in this line; None where that is not sure.

    The name is bound in one place of its function, which the line cannot be reached without, and nothing that the expression
    names is bound in between. Nor does it call a model, or draw random numbers: that is not written twice (who asks for it
    unchecked sees to that).
    """
    scope = _scope_of(source.tree, line)
    bound = [(number, node) for number, what, node in _bindings(scope) if what == name]
    if len(bound) != 1 or not isinstance(bound[0][1], ast.Assign) or name in _parameters(scope):
        return None
    statement = bound[0][1]
    end = statement.end_lineno or statement.lineno
    if not end < line or not isinstance(statement.targets[0], ast.Name) or not _leads_to(scope, statement, line):
        return None
    if is_checked and not all(_may_be_repeated(node, source) for node in ast.walk(statement.value)):
        return None
    read = {_text(node) for node in ast.walk(statement.value) if isinstance(node, (ast.Name, ast.Attribute))}
    if any(end < number < line and what in read for number, what, _ in _bindings(scope)):
        return None
    return statement.value


def last_assigned_to(source: Source, name: str, line: int) -> Assignment | None:
    """The statement that gave a name the value that it has in a line; None where that is not sure.

    Unlike `assigned_to`, the name may have been bound before (`n = len(x)`, then `n = n / world`).
    """
    scope = _scope_of(source.tree, line)
    bound = [(number, node) for number, what, node in _bindings(scope) if what == name]
    before = [(number, node) for number, node in bound if number < line]
    if not before or any(number >= line and _loops_back(scope, number, line) for number, _ in bound):
        return None
    statement = max(before, key=lambda found: found[0])[1]
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
        return None
    is_before = (statement.end_lineno or statement.lineno) < line
    return statement if is_before and _leads_to(scope, statement, line) else None


def _loops_back(scope: ast.AST, later: int, line: int) -> bool:
    """Whether a loop goes from a later line back to this one."""
    loops = (node for node in _within(scope) if isinstance(node, (ast.For, ast.AsyncFor, ast.While)))
    return any(loop.lineno <= line and later <= (loop.end_lineno or 0) for loop in loops)


def is_parameter(source: Source, name: str, line: int) -> bool:
    """Whether a name is a parameter of the function around a line, and is bound nowhere in it."""
    scope = _scope_of(source.tree, line)
    return name in _parameters(scope) and all(what != name for _, what, _ in _bindings(scope))


def _may_be_repeated(node: ast.AST, source: Source) -> bool:
    """Whether a node is no call, or one of a function of PyTorch's or a method of a tensor that only computes."""
    if not isinstance(node, ast.Call):
        return not isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr))
    function = node.func
    if not isinstance(function, ast.Attribute) or any(part in function.attr for part in DRAWING):
        return False
    root: ast.expr = function
    while isinstance(root, ast.Attribute):
        root = root.value
    return (isinstance(root, ast.Name) and root.id in source.torch_names) or hasattr(Tensor, function.attr)


def _scope_of(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function around a line, else the module."""
    found: ast.AST = tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.lineno <= line <= (node.end_lineno or 0):
            found = node  # (`walk` comes to the outer ones first)
    return found


def _parameters(scope: ast.AST) -> set[str]:
    return (
        {node.arg for node in ast.walk(scope.args) if isinstance(node, ast.arg)}
        if isinstance(scope, SCOPES[:2])
        else set()
    )


def _within(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of the functions and classes in it."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, SCOPES):
            waiting += ast.iter_child_nodes(node)


def _bindings(scope: ast.AST) -> Iterator[tuple[int, str, ast.AST]]:
    """Every name or attribute that is bound in a scope: the line, what, and by which statement (a name alone: None else)."""
    for node in _within(scope):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.lineno, node.targets[0].id, node
            continue
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.lineno, node.target.id, node
            continue
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor, ast.NamedExpr)):
            targets = [node.target]
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, (ast.Name, ast.Attribute)):
                    yield part.lineno, _text(part), part


def _leads_to(scope: ast.AST, statement: ast.stmt, line: int) -> bool:
    """Whether the statement stands in a block that the line is a part of (what stands under a `with` is always run)."""
    for node in (scope, *_within(scope)):
        for block in ("body", "orelse", "finalbody"):
            lines: list[ast.stmt] = getattr(node, block, [])
            if isinstance(lines, list) and statement in lines:
                is_part = lines[0].lineno <= line <= (lines[-1].end_lineno or lines[-1].lineno)
                return is_part or (isinstance(node, (ast.With, ast.AsyncWith)) and _leads_to(scope, node, line))
    return False


def _text(node: ast.expr) -> str:
    return ast.unparse(node)
