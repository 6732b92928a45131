"""A line of the user's code and the expressions in it that run operators, told apart from the text alone.

A line can hold several expressions that run one operator, and others that only look like it (`np.log(p)`,
`self.log("loss", x)`). Which of them failed is decided by the caller.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ampguard.capture.record import Line
from ampguard.diagnose.code.text import Edit, joined_lines, spliced

TORCH = frozenset({"torch", "F", "functional"})
FOREIGN = frozenset({"np", "numpy", "math", "jnp", "scipy", "self", "cls"})
SYMBOLS: dict[type[ast.operator], str] = {
    ast.Div: "div", ast.FloorDiv: "floor_divide", ast.Mod: "remainder", ast.Pow: "pow",
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], str] = {**SYMBOLS, ast.Mult: "mul", ast.Add: "add", ast.Sub: "sub"}
"""With those whose two operands may stand either way round in the text: good for their result, not for one operand."""
ALIASES = {
    "true_divide": "div", "divide": "div", "arccos": "acos", "arcsin": "asin", "arctanh": "atanh", "arccosh": "acosh",
    "square": "pow", "slogdet": "_linalg_slogdet", "logdet": "_linalg_slogdet",
    "eigh": "_linalg_eigh", "svd": "_linalg_svd", "eig": "linalg_eig", "qr": "linalg_qr",
}  # fmt: skip
"""Other spellings of an operator, by the name that runs."""
FAMILIES = (frozenset({"div", "reciprocal"}),)
"""Operators that one spelling can run: `a / b` is `reciprocal` and `mul` where `a` is a plain number."""
UNARY_METHODS = frozenset({"pow", "div", "floor_divide", "remainder", "xlogy", "fmod", "mean", "var", "std"})
"""Methods that take an argument; those of every other operator here take none (`self.log("loss", x)` is no logarithm)."""
LONGEST_STATEMENT = 200
"""Characters of a statement over several lines that a fix may quote whole."""
REPEATING = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.IfExp, ast.BoolOp)
"""Expressions whose parts run any number of times, or in another order than they are written."""


@dataclass(frozen=True, slots=True)
class Source:
    """A source file, its syntax tree, and what its names stand for."""

    text: bytes
    tree: ast.Module
    starts: tuple[int, ...]
    torch_names: frozenset[str] = TORCH
    foreign_names: frozenset[str] = FOREIGN
    torch_functions: frozenset[str] | None = None
    """Functions imported by name from PyTorch; None where the imports are not known."""

    @staticmethod
    def of(text: str) -> Source | None:
        """None where the text is not Python by itself."""
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return None
        raw = text.encode()
        starts = [0]
        for line in raw.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return Source(raw, tree, tuple(starts))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[end_line - 1] + end_column

    def written(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.text[start:end].decode()

    def in_parentheses(self, node: ast.expr) -> tuple[int, int] | None:
        """The span with the parentheses around the node, if it stands in any."""
        start, end = self.span(node)
        before, after = self.text[:start].rstrip(), self.text[end:]
        gap = len(after) - len(after.lstrip())
        if before.endswith(b"(") and after[gap : gap + 1] == b")":
            return len(before) - 1, end + gap + 1
        return None


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression that runs an operator. `arguments` are the operator's, by position, `named` those by keyword.

    `statement` is the statement that holds it, None in the head of a compound statement. `in_order` is False where it
    may run more than once, or not at all, when its line runs once.
    """

    node: ast.expr | ast.AugAssign
    name: str
    in_place: bool
    arguments: tuple[ast.expr, ...]
    named: dict[str, ast.expr] = field(default_factory=dict)
    statement: ast.stmt | None = None
    in_order: bool = True

    def operand(self, operator: str, argument: int, name: str | None) -> ast.expr | None:
        """The argument of this number (or name) when the expression runs `operator`."""
        if self.name == "div" and operator == "reciprocal":
            return self.arguments[1] if len(self.arguments) > 1 else None
        if argument < len(self.arguments):
            return self.arguments[argument]
        return self.named.get(name) if name is not None else None

    def writes(self, operand: ast.expr) -> bool:
        """Whether the operand is what the expression overwrites."""
        return self.in_place and bool(self.arguments) and operand is self.arguments[0]

    def takes_any(self, operand: ast.expr) -> bool:
        """Whether the operand stands where any expression may, without parentheses."""
        if isinstance(self.node, ast.AugAssign):
            return operand is self.node.value
        if isinstance(self.node, ast.Call):
            return operand in self.node.args or any(operand is k.value for k in self.node.keywords)
        return False


@dataclass(frozen=True, slots=True)
class LineOfCode:
    """One line of a source, and the statements (or heads of statements) that it belongs to."""

    source: Source
    number: int
    parts: tuple[tuple[ast.AST, ast.stmt | None], ...]

    @property
    def begins_function(self) -> bool:
        text = self.source.text.split(b"\n")[self.number - 1].lstrip()
        return text.startswith((b"def ", b"async def "))

    def calls(self, is_such: Callable[[ast.Call], bool]) -> list[tuple[ast.Call, ast.stmt | None]]:
        """Such calls as this line writes, each with the statement that it is a part of."""
        return [
            (node, statement)
            for part, statement in self.parts
            for node in ast.walk(part)
            if isinstance(node, ast.Call) and is_such(node)
        ]

    def edited(self, node: ast.expr, statement: ast.stmt | None, edits: list[Edit]) -> str:
        """The statement with these edits; the expression alone where its statement spans several lines."""
        return joined_lines(spliced(self.source.text, *self.source.span(shown(node, statement)), edits))

    def expressions(
        self, operator: str, in_place: bool, symbols: dict[type[ast.operator], str] = SYMBOLS
    ) -> list[Expression]:
        """The expressions of this line that can run the operator (or one that shares a spelling), as they run."""
        family = next((f for f in FAMILIES if operator in f), frozenset({operator}))
        return [
            e
            for part, statement in self.parts
            for e in _expressions(self.source, part, statement, True, symbols)
            if e.name in family and e.in_place == in_place and _line_that_runs(e.node) == self.number
        ]


def shown(node: ast.expr | ast.stmt, statement: ast.stmt | None) -> ast.expr | ast.stmt:
    """What a fix quotes for a changed expression: its statement, or the expression alone where that spans several lines."""
    is_short = statement is not None and statement.lineno == statement.end_lineno
    return statement if statement is not None and is_short else node


def called(node: ast.AST) -> set[str]:
    """The names of every function and method called in a piece of code."""
    return {called_name(n) for n in ast.walk(node) if isinstance(n, ast.Call)}


def called_name(call: ast.Call) -> str:
    """The name of the function or method that is called; "" where it has none."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def line_of_code(line: Line) -> LineOfCode | None:
    """The line in its file; by itself where the file cannot be read or parsed."""
    file = line.code.co_filename
    source = _parsed("".join(linecache.getlines(file)))
    if source is not None and (parts := _parts(source.tree, line.number)):
        return LineOfCode(source, line.number, tuple(parts))
    return line_of_text(linecache.getline(file, line.number))


def whole_statement(line: Line) -> str | None:
    """The statement of which a line is a part, in one line; None where the line is a statement, or a head, by itself.

    Of a function of one line (`def loss(p): return -p.log().mean()`) its statements.
    """
    found = line_of_code(line)
    parts = [s for _, s in found.parts if s is not None] if found is not None else []
    if found is not None and parts and all(s.lineno == s.end_lineno for s in parts) and found.begins_function:
        return "; ".join(dict.fromkeys(found.source.written(s) for s in parts))
    if found is None or len(parts) != 1 or parts[0].lineno == parts[0].end_lineno:
        return None
    text = joined_lines(found.source.written(parts[0]))
    return text if len(text) <= LONGEST_STATEMENT else None


def line_of_text(text: str) -> LineOfCode | None:
    """A line that stands by itself; None where it is no complete statement."""
    source = Source.of(text.strip())
    if source is None:
        return None
    return LineOfCode(source, 1, tuple(_parts(source.tree, 1)))


def plain_number(node: ast.expr) -> float | None:
    """The value of a number that is written out (`2`, `-1e-8`, `2 * 3`); None for anything else.

    >>> plain_number(ast.parse("2 * 3.5", mode="eval").body), plain_number(ast.parse("n", mode="eval").body)
    (7.0, None)
    """
    if any(
        not isinstance(n, (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)) for n in ast.walk(node)
    ):
        return None
    if any(isinstance(n, ast.Constant) and type(n.value) not in (int, float) for n in ast.walk(node)):
        return None
    if any(isinstance(n, ast.Pow) for n in ast.walk(node)) and len(ast.unparse(node)) > 16:
        return None
    try:
        return float(eval(compile(ast.Expression(node), "<number>", "eval"), {"__builtins__": {}}))
    except (ArithmeticError, ValueError, TypeError):
        return None


def is_python_number(node: ast.expr) -> bool:
    """Whether it is certain from the text that no tensor takes part: `4 / math.pi ** 2`, `math.sqrt(d)`, `2 * len(x)`."""
    match node:
        case ast.UnaryOp():
            return is_python_number(node.operand)
        case ast.BinOp():
            return is_python_number(node.left) and is_python_number(node.right)
        case ast.Attribute(value=ast.Name(id="math")) | ast.Call(func=ast.Attribute(value=ast.Name(id="math"))):
            return True
        case ast.Attribute(value=ast.Name(id="np" | "numpy" | "torch"), attr="pi" | "e" | "inf"):
            return True
        case ast.Call(func=ast.Name(id="len" | "float" | "int")):
            return True
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


# --- the line in its file ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _parsed(text: str) -> Source | None:
    source = Source.of(text) if text else None
    if source is None:
        return None
    torch_names, foreign, functions = set(TORCH), set(FOREIGN), set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                bound = name.asname or name.name.partition(".")[0]
                (torch_names if name.name.partition(".")[0] == "torch" else foreign).add(bound)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch" and not node.level:
            functions |= {name.asname or name.name for name in node.names}
            torch_names |= {name.asname or name.name for name in node.names if name.name in ("functional", "special")}
    known = None if "*" in functions else frozenset(functions)
    return Source(
        source.text, source.tree, source.starts, frozenset(torch_names), frozenset(foreign - torch_names), known
    )


def _parts(node: ast.AST, number: int) -> list[tuple[ast.AST, ast.stmt | None]]:
    """The simple statements on a line, and the heads of compound ones (`if`, `for`, `with`, `def`)."""
    found: list[tuple[ast.AST, ast.stmt | None]] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            if not child.lineno <= number <= (child.end_lineno or child.lineno):
                continue
            if not hasattr(child, "body") and not hasattr(child, "cases"):
                found.append((child, child))
                continue
        elif isinstance(child, (ast.excepthandler, ast.match_case)):
            pass
        elif isinstance(node, ast.stmt):
            found.append((child, None))
            continue
        found += _parts(child, number)
    return found


def _line_that_runs(node: ast.expr | ast.AugAssign) -> int:
    """The line that Python gives while the expression runs: of a method call, the line of the method's name."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.end_lineno or node.lineno
    return node.lineno


# --- expressions ------------------------------------------------------------------------------------------------------


def _expressions(
    source: Source,
    node: ast.AST,
    statement: ast.stmt | None,
    in_order: bool,
    symbols: dict[type[ast.operator], str],
) -> Iterator[Expression]:
    """Every expression that may run an operator, operands before the operator, as Python evaluates them."""
    inside = in_order and not isinstance(node, REPEATING)
    for child in ast.iter_child_nodes(node):
        yield from _expressions(source, child, statement, inside, symbols)
    if isinstance(node, ast.BinOp) and (name := symbols.get(type(node.op))):
        if not is_python_number(node):
            yield Expression(node, name, False, (node.left, node.right), {}, statement, in_order)
    elif isinstance(node, ast.AugAssign) and (name := symbols.get(type(node.op))):
        if isinstance(node.target, ast.expr):
            yield Expression(node, name, True, (node.target, node.value), {}, statement, in_order)
    elif isinstance(node, ast.Call) and (found := _call(source, node)) is not None:
        spelled, arguments = found
        name = ALIASES.get(spelled.rstrip("_"), spelled.rstrip("_"))
        named = {k.arg: k.value for k in node.keywords if k.arg is not None}
        yield Expression(node, name, spelled.endswith("_"), arguments, named, statement, in_order)


def _call(source: Source, node: ast.Call) -> tuple[str, tuple[ast.expr, ...]] | None:
    """(name, the operator's arguments) of `torch.log(p)`, `p.log()`, and `log(p)` where it comes from PyTorch."""
    function = node.func
    if any(isinstance(a, ast.Starred) for a in node.args):
        return None
    if isinstance(function, ast.Name):
        known = source.torch_functions
        is_torch = known is None or function.id in known
        return (function.id, tuple(node.args)) if is_torch and node.args else None
    if not isinstance(function, ast.Attribute):
        return None
    base = _base(function.value)
    if base in source.torch_names and _is_dotted(function.value):
        return function.attr, tuple(node.args)
    if base in source.foreign_names and isinstance(function.value, ast.Name):
        return None
    name = function.attr.rstrip("_")
    if node.args and ALIASES.get(name, name) not in UNARY_METHODS:
        return None
    return function.attr, (function.value, *node.args)


def _base(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_dotted(node: ast.expr) -> bool:
    """`torch.nn.functional`, and not `torch.ones(3)` or `self.torch`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
