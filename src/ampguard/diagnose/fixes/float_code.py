"""A statement outside modules, with its low-precision variables in float32: `sim = u.float() @ v.float().T`.

Which of its names are tensors, the text alone does not tell. The operators that ran in the line do, by what they were given.
"""

from __future__ import annotations

import ast
import sys

from torch import Tensor

from ampguard.capture.frames import frames_here, locals_of
from ampguard.capture.record import Line
from ampguard.diagnose.code.source import LONGEST_STATEMENT, REPEATING, Source, line_of_code
from ampguard.diagnose.code.text import Edit, joined_lines, spliced
from ampguard.diagnose.evidence import Evidence
from ampguard.numerics import is_low_precision
from ampguard.replay.trace import TracedTensor

MAX_FRAMES = 40


def in_float32(evidence: Evidence, line: Line) -> str | None:
    """The statement of a line, in float32; None where it is not known which names have to be widened."""
    code = line_of_code(line)
    found = [statement for _, statement in code.parts if statement is not None] if code is not None else []
    if code is None or len(found) != 1 or not isinstance(found[0], (ast.Assign, ast.AnnAssign, ast.Return)):
        return None
    statement = found[0]
    if statement.value is None or any(isinstance(node, REPEATING) for node in ast.walk(statement.value)):
        return None
    names, attributes = _read_in(statement.value, code.source)
    low = _low_names(evidence, line, names, attributes)
    if low is None:
        return None
    edits: list[Edit] = []
    for node in ast.walk(statement.value):
        if isinstance(node, ast.Name) and node.id in low:
            _, end = code.source.span(node)
            edits.append((end, end, ".float()"))
    text = joined_lines(spliced(code.source.text, *code.source.span(statement), edits))
    return text if len(text) <= LONGEST_STATEMENT else None


def _read_in(value: ast.expr, source: Source) -> tuple[set[str], set[str]]:
    """The variables in an expression that may be tensors, and the attributes of `self`."""
    called = {id(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)}
    known = source.torch_names | source.foreign_names | _imported(source.tree)
    names = {
        node.id
        for node in ast.walk(value)
        if isinstance(node, ast.Name) and id(node) not in called and node.id not in known
    }
    attributes = {
        ast.unparse(node)
        for node in ast.walk(value)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    }
    return names, attributes


def _imported(tree: ast.Module) -> set[str]:
    imports = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}


def _low_names(evidence: Evidence, line: Line, names: set[str], attributes: set[str]) -> set[str] | None:
    """Which of these names are tensors of low precision: by the running frame, else by what the operators were given.

    None where that leaves doubts. Autocast may have made the low precision itself: then there is none among them.
    """
    for frame in frames_here(sys._getframe(1), MAX_FRAMES):
        if frame.f_code is line.code:
            values = locals_of(frame)
            tensors = {name for name in names if isinstance(values.get(name), Tensor)}
            return {name for name in tensors if is_low_precision(values[name].dtype)}
    given = _given(evidence, line)
    low = [tensor for tensor in given if is_low_precision(tensor.dtype)]
    if not low and given:
        return set()
    return names if len(low) == len(names) and len(given) - len(low) <= len(attributes) else None


def _given(evidence: Evidence, line: Line) -> list[TracedTensor]:
    """What the operators of a line were given that none of them has made, when it ran first."""
    own: set[int] = set()
    found: dict[tuple[int, ...], TracedTensor] = {}
    for op in evidence.trace.ops:
        if op.root is not None or op.line != line or op.in_backward:
            if own:
                break
            continue
        for tensor in op.inputs:
            if tensor.made_by is None or tensor.made_by[0] not in own:
                found.setdefault(tensor.made_by or (tensor.storage, *tensor.shape), tensor)
        own.add(op.index)
    return list(found.values())
