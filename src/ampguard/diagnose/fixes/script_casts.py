"""Casts to low precision that the text of a script makes outside modules.

Under autocast `x.half()` of what is float16 already runs no operator, so a step that is replayed without autocast shows
nothing of it; in the script it stays, and undoes the fix. So the text is asked: the statements that made what the bad value
was computed from, and those that made the names they read.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from types import CodeType

from ampguard.capture.record import Line
from ampguard.diagnose import words
from ampguard.diagnose.code.source import line_of_code
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Proposal
from ampguard.replay.trace import Trace, TracedOp

METHODS = frozenset({"half", "bfloat16"})
TYPES = frozenset({"float16", "half", "bfloat16", "HalfTensor", "BFloat16Tensor"})
CONVERTING = frozenset({"to", "type", "astype"})
MAX_BEHIND = 4_000
"""Operators that are looked at, from the bad one back."""


def own_casts_of(evidence: Evidence, proposal: Proposal) -> str:
    """What else a change of autocast needs, where lines cast to low precision by themselves: of the smallest region that
    leaves it, and of what the bad value was computed from outside modules."""
    if not proposal.is_of_autocast and not proposal.standing:
        return ""
    another = "bfloat16" if proposal.action == "use-bf16" else "float32"
    behind = (*casts_behind(evidence), *evidence.own_casts) if proposal.is_of_autocast else ()
    by_text, by_region = sorted_casts((*behind, *proposal.standing), proposal.standing)
    joined = ", and" if proposal.is_of_autocast else "\nand"
    text = f"{joined} {another} in place of the script's own casts in: {by_text}" if by_text else ""
    return text + (f", also in: {by_region}" if by_region else "")


def sorted_casts(lines: Iterable[Line], known: Collection[Line] = ()) -> tuple[str, str]:
    """The code of lines that cast in their own text (`known`: those of which it is known), and the regions of autocast in
    which the others stand."""
    lines = tuple(lines)
    by_text = {line for line in lines if line in known or casts(line)}
    regions = {line: region for line in lines if line not in by_text and (region := autocast_around(line)) is not None}
    heads = dict.fromkeys(f"{words.code_at(region)}  # {words.line_name(region)}" for region in regions.values())
    return words.codes_at(line for line in lines if line not in regions), "; ".join(heads)


def autocast_around(line: Line) -> Line | None:
    """The innermost region of autocast around a line, in its own function or on it, as its `with` or decorator says."""
    found = line_of_code(line)
    scope = _scope(found.source.tree, line.code) if found is not None else None
    heads: list[int] = []
    for node in ast.walk(scope) if scope is not None else ():
        if isinstance(node, (ast.With, ast.AsyncWith)) and node.lineno < line.number <= (node.end_lineno or 0):
            heads += [node.lineno for item in node.items if _is_autocast(item.context_expr)]
    for decorator in getattr(scope, "decorator_list", ()):
        heads += [decorator.lineno] if _is_autocast(decorator) else []
    return Line(line.code, max(heads)) if heads else None


def casts_behind(evidence: Evidence) -> tuple[Line, ...]:
    """Lines outside modules that cast, and on whose results the accused operator's operands depend; in their order."""
    lines: dict[tuple[CodeType, int], Line] = {}
    for op in (evidence.op, *made_from(evidence.trace, evidence.op)):
        if op.root is None and op.line is not None and not op.in_backward:
            lines.setdefault((op.line.code, op.line.number), op.line)
    by_scope: dict[CodeType, list[Line]] = {}
    for line in lines.values():
        by_scope.setdefault(line.code, []).append(line)
    found = {line for scope in by_scope.values() for line in (*scope, *_of_names_read(scope)) if casts(line)}
    return tuple(sorted(found, key=lambda line: (line.code.co_filename, line.number)))


def made_from(trace: Trace, op: TracedOp) -> Iterator[TracedOp]:
    """The operators whose results went into this one's, the latest first."""
    wanted = {t.made_by[0] for t in op.inputs if t.made_by is not None}
    by_index = {other.index: other for other in trace.ops}
    for _ in range(MAX_BEHIND):
        if not wanted:
            return
        index = max(wanted)
        wanted.remove(index)
        maker = by_index.get(index)
        if maker is not None and maker.index != op.index:
            yield maker
            wanted |= {t.made_by[0] for t in maker.inputs if t.made_by is not None and t.made_by[0] < index}


def casts(line: Line) -> bool:
    """Whether the statement casts to low precision by itself (to enter autocast is no cast)."""
    found = line_of_code(line)
    return found is not None and any(_casts(part) for part, _ in found.parts)


def _casts(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        function, given = node.func, (*node.args, *(k.value for k in node.keywords))
        if isinstance(function, ast.Attribute) and function.attr in METHODS and not given:
            return True
        makes = isinstance(function, ast.Attribute) and function.attr in CONVERTING
        if (makes and any(is_low_type(a) for a in given)) or any(
            k.arg == "dtype" and is_low_type(k.value) for k in node.keywords if not _is_autocast(function)
        ):
            return True
    return any(_casts(child) for child in ast.iter_child_nodes(node))


def _is_autocast(function: ast.expr) -> bool:
    return "autocast" in ast.unparse(function)


def is_low_type(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.rpartition(".")[2] in TYPES
    return isinstance(node, ast.Attribute) and node.attr in TYPES


def _of_names_read(lines: list[Line]) -> list[Line]:
    """Statements of the same scope that cast, and assign a name which one of these lines reads."""
    found = [line_of_code(line) for line in lines]
    source = next((line.source for line in found if line is not None), None)
    scope = _scope(source.tree, lines[0].code) if source is not None else None
    if scope is None:
        return []
    read = {
        name.id
        for line in found
        if line is not None
        for part, _ in line.parts
        for name in ast.walk(part)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)
    }
    return [
        Line(lines[0].code, statement.lineno)
        for statement in _statements(scope)
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and _names_assigned(statement) & read
    ]


def _scope(tree: ast.Module, code: CodeType) -> ast.AST | None:
    """The function (or the whole module) whose code this is."""
    if code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a scope, without those of functions and classes in it."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from _statements(child)


def _names_assigned(statement: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
