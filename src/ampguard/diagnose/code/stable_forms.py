"""Stable forms as the script would write them: `torch.log(torch.exp(x).sum(-1))` becomes `torch.logsumexp(x, -1)`.

What goes into the logarithm may be computed in another statement and have a name; where the text leaves doubts about it, the
form stays in words.
"""

from __future__ import annotations

import ast

from ampguard.capture.record import Line
from ampguard.diagnose.code.assigned import assigned_to
from ampguard.diagnose.code.rewrite import PRIMARY
from ampguard.diagnose.code.source import LineOfCode, Source, called_name, line_of_code, plain_number

GUARDS = frozenset({"clamp", "clamp_min", "clip"})


def with_stable_form(line: Line | None, form: str) -> str | None:
    """The statement with a stable form (`torch.logsumexp(x, dim)`) in the place of its one logarithm."""
    code = line_of_code(line) if line is not None else None
    logs = code.calls(lambda n: _is_call(n, "log") and _touches(n, line)) if code is not None else []
    if code is None or len(logs) != 1:
        return None
    log, statement = logs[0]
    operand = _operand(code, log)
    written = _written(code, _meant(code, _without_guard(operand), log), form) if operand is not None else None
    return code.edited(log, statement, [(*code.source.span(log), written)]) if written is not None else None


def _meant(code: LineOfCode, inner: ast.expr, place: ast.expr) -> ast.expr:
    """What goes into the logarithm, where that has a name: the expression that was assigned to it."""
    assigned = assigned_to(code.source, inner.id, place.lineno) if isinstance(inner, ast.Name) else None
    return _without_guard(assigned) if assigned is not None else inner


def _written(code: LineOfCode, inner: ast.expr, form: str) -> str | None:
    name = form.partition("(")[0]
    if name == "torch.log_softmax":
        return _of(code, inner, "softmax", name)
    if form == "F.logsigmoid(x)":
        return _of(code, inner, "sigmoid", "torch.nn.functional.logsigmoid")
    if form == "F.logsigmoid(-x)" and isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub):
        operand = _given(code, _meant(code, inner.right, inner), "sigmoid")
        is_one = plain_number(inner.left) == 1
        return f"torch.nn.functional.logsigmoid(-{_primary(code, operand)})" if operand is not None and is_one else None
    if name == "torch.logdet":
        return _of(code, inner, "det", name)
    if name == "torch.linalg.slogdet":
        absolute = _given(code, inner, "abs")
        found = _of(code, absolute, "det", name) if absolute is not None else None
        return f"{found}[1]" if found is not None else None
    outer = {"torch.logcumsumexp": "cumsum", "torch.logsumexp": "mean" if " - " in form else "sum"}.get(name)
    exponentials = _given(code, inner, outer) if outer is not None else None
    x = _given(code, exponentials, "exp") if exponentials is not None else None
    if x is None or outer is None:
        return None
    along = _others(code, inner)
    text = code.source.written(x)
    result = f"{name}({text}, {along})" if along else f"{name}({_primary(code, x)}.flatten(), 0)"
    less = _how_many(code, inner, x) or form.partition(" - ")[2] if " - " in form else ""
    return f"({result} - {less})" if less else result


def _of(code: LineOfCode, node: ast.expr, function: str, name: str) -> str | None:
    """A call of one function as one of another, with the same arguments."""
    operand = _given(code, node, function)
    if operand is None:
        return None
    others = _others(code, node)
    return f"{name}({code.source.written(operand)}{', ' if others else ''}{others})"


def _how_many(code: LineOfCode, mean: ast.expr, x: ast.expr) -> str | None:
    """The logarithm of how many a mean is of, in batches of any size; None where the text does not tell it."""
    if not isinstance(x, (ast.Name, ast.Attribute)) or not isinstance(mean, ast.Call):
        return None
    is_method = isinstance(mean.func, ast.Attribute) and not _is_of_torch(code.source, mean.func.value)
    along = [*mean.args[not is_method :], *(k.value for k in mean.keywords if k.arg in ("dim", "axis"))]
    text = code.source.written(x)
    if not along:
        return f"math.log({text}.numel())"
    number = plain_number(along[0])
    return f"math.log({text}.shape[{number:g}])" if number is not None else None


def _given(code: LineOfCode, node: ast.expr | None, function: str) -> ast.expr | None:
    """What a call of this function, as a method or of PyTorch, is applied to; None where the node is no such call."""
    return (
        _operand(code, node) if node is not None and _is_call(node, function) and isinstance(node, ast.Call) else None
    )


def _operand(code: LineOfCode, call: ast.Call) -> ast.expr | None:
    if not isinstance(call.func, ast.Attribute):
        return call.args[0] if call.args else None
    if _is_of_torch(code.source, call.func.value):
        return call.args[0] if call.args else None
    is_module = isinstance(call.func.value, ast.Name) and call.func.value.id in ("self", "cls", "math", "np", "numpy")
    return None if is_module else call.func.value


def _others(code: LineOfCode, node: ast.expr) -> str:
    """The further arguments of a call, as they are written."""
    assert isinstance(node, ast.Call)
    is_method = isinstance(node.func, ast.Attribute) and not _is_of_torch(code.source, node.func.value)
    args = [code.source.written(a) for a in node.args[not is_method :]]
    return ", ".join([*args, *(f"{k.arg}={code.source.written(k.value)}" for k in node.keywords)])


def _is_of_torch(source: Source, node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in source.torch_names


def _touches(node: ast.AST, line: Line | None) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", None)
    return line is not None and first <= line.number <= (last or first)


def _is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and called_name(node) == name


def _without_guard(node: ast.expr) -> ast.expr:
    """`softmax(x) + 1e-9`, `softmax(x).clamp(min=1e-9)`: without its epsilon."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [side for side in (node.left, node.right) if plain_number(side) is None]
        return sides[0] if len(sides) == 1 else node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GUARDS:
        is_guard = not node.args or plain_number(node.args[0]) is not None
        return node.func.value if is_guard else node
    return node


def _primary(code: LineOfCode, node: ast.expr) -> str:
    written = code.source.written(node)
    return written if isinstance(node, PRIMARY) else f"({written})"
