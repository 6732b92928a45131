"""Whether an expression of the script's may be computed once more: it only computes, and draws no random numbers.

Names are looked up as they stand now. What is read are tensors, numbers, containers of them and attributes that objects
hold themselves (no properties); what is called are functions and methods of PyTorch's, and functions of the script's own
that consist of nothing else.
"""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.diagnose.code.assigned import DRAWING
from ampguard.diagnose.code.source import Source

PLAIN = (
    Tensor,
    int,
    float,
    bool,
    str,
    bytes,
    list,
    tuple,
    dict,
    type(None),
    types.ModuleType,
    torch.dtype,
    torch.device,
)

FORBIDDEN = (
    ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda, ast.JoinedStr, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp,
)  # fmt: skip

PURE_MODULES = ("torch.functional", "torch.nn.functional", "torch._C", "torch")
"""Where a function may be defined that is called."""

STATEFUL = ("seed", "set_", "save", "load", "compile", "use_", "register", "backward", "requires_grad", "retain")
"""Parts of the names of functions that do more than compute."""

DEPTH = 3
"""Functions of the script's that call one another."""

_UNKNOWN = object()
"""A name's value that is made by the code itself."""


def is_pure(expression: ast.expr, names: Mapping[str, Any], depth: int = DEPTH) -> bool:
    """Whether it may be computed once more, where these are the names that it can read."""
    return _is_pure(expression, lambda name: names.get(name, _NUMBERS.get(name)), depth)


_NUMBERS: dict[str, Any] = {"len": len, "float": float, "int": int, "abs": abs, "min": min, "max": max, "sum": sum}
"""Functions of Python's own that only compute."""


def _is_pure(node: ast.AST, look_up: Callable[[str], Any], depth: int) -> bool:
    if isinstance(node, FORBIDDEN):
        return False
    if isinstance(node, ast.Call):
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        return _may_be_called(node, look_up, depth) and all(_is_pure(a, look_up, depth) for a in arguments)
    if isinstance(node, (ast.Name, ast.Attribute)):
        value = _value_of(node, look_up)
        if value is not None and value is not _UNKNOWN:
            return isinstance(value, (*PLAIN, nn.Module))
        return value is _UNKNOWN or isinstance(node, ast.Name)
    return all(_is_pure(child, look_up, depth) for child in ast.iter_child_nodes(node))


def _value_of(node: ast.expr, look_up: Callable[[str], Any]) -> Any:
    """What a name or a chain of attributes stands for; `_UNKNOWN` of what the code makes itself, None where it is not sure."""
    if isinstance(node, ast.Name):
        return look_up(node.id)
    if not isinstance(node, ast.Attribute):
        return _UNKNOWN
    base = _value_of(node.value, look_up)
    if base is _UNKNOWN or isinstance(base, Tensor):
        is_known = hasattr(Tensor, node.attr)
        return _UNKNOWN if is_known and (base is _UNKNOWN or _is_quiet(node.attr)) else None
    if isinstance(base, types.ModuleType):
        return getattr(base, node.attr, None)
    if isinstance(base, nn.Module):
        for place in (compat.parameters_of(base), compat.buffers_of(base), compat.children_of(base)):
            if node.attr in place:
                return place[node.attr]
    return getattr(base, "__dict__", {}).get(node.attr)


def _is_quiet(name: str) -> bool:
    """Whether a method or function of this name does nothing but compute, as far as names tell."""
    is_dunder = name.startswith("__")
    does_more = name.endswith("_") or any(part in name for part in (*STATEFUL, *DRAWING))
    return not is_dunder and not does_more


def _may_be_called(call: ast.Call, look_up: Callable[[str], Any], depth: int) -> bool:
    function = call.func
    if any(keyword.arg in ("out", "inplace", None) for keyword in call.keywords):
        return False
    if isinstance(function, ast.Attribute):
        base = _value_of(function.value, look_up)
        if base is _UNKNOWN or isinstance(base, Tensor):  # a method of a tensor
            is_read = base is not _UNKNOWN or _is_pure(function.value, look_up, depth)
            return is_read and hasattr(Tensor, function.attr) and _is_quiet(function.attr)
    value = _value_of(function, look_up)
    if any(value is known for known in _NUMBERS.values()):
        return True
    if isinstance(value, types.FunctionType) and not _is_pytorchs(value):
        return depth > 0 and _is_pure_function(value, depth - 1)
    return _is_pytorchs(value) and _is_quiet(getattr(value, "__name__", "_"))


def _is_pytorchs(value: Any) -> bool:
    if not isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.BuiltinMethodType)):
        return False
    module = getattr(value, "__module__", None) or ""
    return module in PURE_MODULES or module.startswith("torch._C")


def _is_pure_function(function: types.FunctionType, depth: int) -> bool:
    """Whether a function of the script's only gives names to what it computes, and returns it."""
    code = function.__code__
    source = Source.of("".join(linecache.getlines(code.co_filename)))
    found = [
        node
        for node in (ast.walk(source.tree) if source is not None else ())
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name and not node.decorator_list
    ]
    body = next((node.body for node in found if node.lineno == code.co_firstlineno), None)
    if body is None or function.__closure__:
        return False
    own = dict.fromkeys(code.co_varnames, _UNKNOWN)
    names = function.__globals__

    def look_up(name: str) -> Any:
        return own[name] if name in own else names.get(name, _NUMBERS.get(name))

    return all(_is_plain_statement(statement, look_up, depth) for statement in body)


def _is_plain_statement(statement: ast.stmt, look_up: Callable[[str], Any], depth: int) -> bool:
    if isinstance(statement, ast.Return):
        return statement.value is not None and _is_pure(statement.value, look_up, depth)
    if isinstance(statement, ast.Assign):
        names = [part for target in statement.targets for part in ast.walk(target) if isinstance(part, ast.expr)]
        are_names = all(isinstance(part, (ast.Name, ast.Tuple)) for part in names)
        return are_names and _is_pure(statement.value, look_up, depth)
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
