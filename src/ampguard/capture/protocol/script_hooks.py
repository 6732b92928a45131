"""What becomes of a number that a hook has read in the middle of a backward pass: does the script show it as it is?

The hook itself may print it or compare it. What it keeps in a list or a dictionary is used elsewhere: in the function around it,
at the script's module level, by whoever reads the attribute. There the units are followed as well, and nothing is said
unless it is used as it is, and in no place as a part of a ratio.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampguard.capture.protocol.script_source import calls_at, function_of, tree_of
from ampguard.capture.protocol.script_units import READING, Spot, Units, Use


def use_in_hook(spots: list[Spot], power: float) -> Use:
    """A number that carries S^`power` was read at the innermost of `spots`; the outermost is the hook."""
    line, wanted = spots[0].line if spots else 0, None
    for spot in spots:
        function = hook_of(spot)
        names = {wanted} if wanted else READING
        seeds = calls_at(function, line if wanted is None else spot.line, names) if function is not None else ()
        if function is None or not seeds:
            break
        units = Units(seeds, power, spot.scales)
        units.walk(function)
        if units.is_raw or units.cancels:
            return Use(units.is_raw and not units.cancels, units.clips)
        if units.kept:
            return Use(is_shown_later(spot, function, units.kept, power))
        if not units.returned:
            break
        power, wanted = units.returned, spot.code.co_name
    return Use()


def hook_of(spot: Spot) -> ast.AST | None:
    """The source of a function, or the only lambda that begins at its line."""
    if spot.code.co_name != "<lambda>":
        return function_of(spot.code)
    tree = tree_of(spot.code.co_filename)
    nodes = ast.walk(tree) if tree is not None else ()
    found = [n for n in nodes if isinstance(n, ast.Lambda) and n.lineno == spot.code.co_firstlineno]
    return found[0] if len(found) == 1 else None


def is_shown_later(spot: Spot, hook: ast.AST, holders: set[str], power: float) -> bool:
    """Whether what one of these holds is used as it is elsewhere in the file, and nowhere so that the scale may cancel."""
    tree = tree_of(spot.code.co_filename)
    wanted, is_raw = {_last(holder) for holder in holders}, False
    for scope in _scopes(tree, hook) if tree is not None else ():
        own = list(_own(scope))
        loads = [n for n in own if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Load)]
        if not _is_around(scope, hook):  # its own variables are others than the hook's
            loads = [n for n in loads if isinstance(n, ast.Attribute)]
        names = {name: power for name in map(ast.unparse, loads) if _last(name) in wanted}
        if not names:
            continue
        units = Units((), power, names)
        units.walk(scope)
        if units.cancels or units.computes or any(isinstance(n, ast.Attribute) and n.attr == "get_scale" for n in own):
            return False
        is_raw = is_raw or units.is_raw
    return is_raw


def _scopes(tree: ast.Module, hook: ast.AST) -> Iterator[ast.AST]:
    yield tree
    functions = (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    yield from (function for function in functions if function is not hook)


def _is_around(scope: ast.AST, hook: ast.AST) -> bool:
    return any(node is hook for node in ast.walk(scope))


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or a module, without those of functions and classes in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield child
            yield from _own(child)


def _last(name: str) -> str:
    """
    >>> _last("self.norms"), _last("norms")
    ('.norms', 'norms')
    """
    _, dot, attribute = name.rpartition(".")
    return dot + attribute
