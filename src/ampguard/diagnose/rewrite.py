"""The user's line with a fix in it: `torch.log(p)` becomes `torch.log(p.clamp(min=1e-08))`."""

from __future__ import annotations

import ast
from collections.abc import Callable

NAMESPACES = frozenset({"torch", "F", "nn", "functional", "np", "math", "special", "linalg"})

Change = Callable[[ast.expr], ast.expr]


def with_operand(code: str, names: frozenset[str], template: str) -> str | None:
    """The line with the operand of a call or method named in `names` put through `template` (`{}` stands for it).

    None where the line cannot be parsed on its own or holds no such call.

    >>> with_operand("loss = -(t * torch.log(p)).mean()", frozenset({"log"}), "{}.clamp(min=1e-8)")
    'loss = -(t * torch.log(p.clamp(min=1e-08))).mean()'
    """
    tree = _parsed(code)
    if tree is None:
        return None
    change = _OperandChange(names, template)
    new = change.visit(tree)
    return ast.unparse(new).strip() if change.done else None


def with_divisor(code: str, template: str) -> str | None:
    """The line with the divisor of its first `/` put through `template`.

    >>> with_divisor("x = a / b.sum()", "({} + 1e-6)")
    'x = a / (b.sum() + 1e-06)'
    """
    tree = _parsed(code)
    if tree is None:
        return None
    change = _DivisorChange(template)
    new = change.visit(tree)
    return ast.unparse(new).strip() if change.done else None


def _parsed(code: str) -> ast.AST | None:
    try:
        return ast.parse(code.strip())
    except SyntaxError:
        return None


def _filled(template: str, operand: ast.expr) -> ast.expr:
    text = ast.unparse(operand)
    if not isinstance(operand, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
        text = f"({text})"
    return ast.parse(template.format(text), mode="eval").body


class _OperandChange(ast.NodeTransformer):
    def __init__(self, names: frozenset[str], template: str) -> None:
        self._names = names
        self._template = template
        self.done = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if self.done:
            return node
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr.rstrip("_") in self._names:
            if isinstance(function.value, ast.Name) and function.value.id in NAMESPACES and node.args:
                node.args[0] = _filled(self._template, node.args[0])
            else:
                function.value = _filled(self._template, function.value)
            self.done = True
        elif isinstance(function, ast.Name) and function.id in self._names and node.args:
            node.args[0] = _filled(self._template, node.args[0])
            self.done = True
        return node


class _DivisorChange(ast.NodeTransformer):
    def __init__(self, template: str) -> None:
        self._template = template
        self.done = False

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Div) and not self.done:
            node.right = _filled(self._template, node.right)
            self.done = True
        return node
