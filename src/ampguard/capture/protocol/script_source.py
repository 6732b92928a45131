"""The source of a script as trees: a function's, and the calls at one of its lines."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from collections.abc import Iterable
from types import CodeType

MAX_LINES = 20_000


@functools.lru_cache(maxsize=64)
def tree_of(path: str) -> ast.Module | None:
    lines = linecache.getlines(path)
    if not lines or len(lines) > MAX_LINES:
        return None
    try:
        return ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return None


MOST_FUNCTIONS = 1 << 10
_functions: dict[int, tuple[CodeType, ast.AST | None, ast.AST | None]] = {}
"""By the identity of the code, which is kept, so that its identity stays its own: the tree of its file, and the function's."""


def function_of(code: CodeType) -> ast.AST | None:
    """The source of a function or of a script's module level."""
    tree = tree_of(code.co_filename)
    known = _functions.get(id(code))
    if known is not None and known[1] is tree:
        return known[2]
    if len(_functions) >= MOST_FUNCTIONS:
        _functions.clear()
    found = _function_in(tree, code)
    _functions[id(code)] = code, tree, found
    return found


def _function_in(tree: ast.AST | None, code: CodeType) -> ast.AST | None:
    if tree is None or code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first <= code.co_firstlineno <= node.lineno:
                return node
    return None


def calls_at(function: ast.AST, line: int, names: Iterable[str | None]) -> tuple[ast.Call, ...]:
    """The calls at a line of what has one of these names."""
    return tuple(call for call in _all_calls_at(function, line) if last_name(call.func) in names)


def only_call_at(function: ast.AST, line: int) -> tuple[ast.Call, ...]:
    """The call at a line, where there is one alone: what is called may have another name than its code (a partial)."""
    found = _all_calls_at(function, line)
    return tuple(found) if len(found) == 1 else ()


def running_call(function: ast.AST, code: CodeType, instruction: int) -> tuple[ast.Call, ...]:
    """The call in which a frame stands, whatever it is of: an object that is called has no name of a function's there.

    None before Python 3.11, whose code does not know the columns of its instructions (PEP 657).
    """
    positions = getattr(code, "co_positions", None)
    place = (
        next(itertools.islice(positions(), instruction // 2, None), None) if positions and instruction >= 0 else None
    )
    if place is None or place[1] is None or place[3] is None:
        return ()
    calls = (n for n in ast.walk(function) if isinstance(n, ast.Call))
    return tuple(call for call in calls if (call.end_lineno, call.end_col_offset) == (place[1], place[3]))


def _all_calls_at(function: ast.AST, line: int) -> list[ast.Call]:
    return [n for n in ast.walk(function) if isinstance(n, ast.Call) and n.lineno <= line <= (n.end_lineno or 0)]


def last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
