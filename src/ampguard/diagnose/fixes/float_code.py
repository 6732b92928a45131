"""A statement outside modules, with its low-precision variables in float32: `sim = u.float() @ v.float().T`.

Which of its names are tensors, the text alone does not tell. The operators that ran in the line do, by what they were given.
"""

from __future__ import annotations

import ast
import sys
from typing import Any

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
    read, attributes = _read_in(statement.value, code.source)
    low = _low_names(evidence, line, read, attributes)
    if low is None:
        return None
    edits: list[Edit] = []
    for name in low:
        for node in read[name]:
            _, end = code.source.span(node)
            edits.append((end, end, ".float()"))
    text = joined_lines(spliced(code.source.text, *code.source.span(statement), edits))
    return text if len(text) <= LONGEST_STATEMENT else None


def _read_in(value: ast.expr, source: Source) -> tuple[dict[str, list[ast.expr]], set[str]]:
    """What in an expression may be a tensor, by its text, and the attributes of `self`.

    A variable; where what it holds is no tensor (`out["mean"]`, `batch.mask`), what is taken from it.
    """
    called = {id(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)}
    known = source.torch_names | source.foreign_names | _imported(source.tree)
    holders = {
        id(base): node for node in ast.walk(value) if isinstance(node, ast.expr) and (base := _holder(node)) is not None
    }
    read: dict[str, list[ast.expr]] = {}
    for node in ast.walk(value):
        if isinstance(node, ast.Name) and id(node) not in called and node.id not in known:
            part: ast.expr = node
            while (taken := holders.get(id(part))) is not None and id(taken) not in called:
                part = taken
            read.setdefault(ast.unparse(part), []).append(part)
    attributes = {
        ast.unparse(node)
        for node in ast.walk(value)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    }
    return read, attributes


def _holder(node: ast.expr) -> ast.expr | None:
    """What an expression takes an item or an attribute from, where no tensor has such a one (but as a method)."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.value
    if not isinstance(node, ast.Attribute) or not callable(getattr(Tensor, node.attr, _holder)):
        return None
    return node.value


def _imported(tree: ast.Module) -> set[str]:
    imports = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}


def _low_names(
    evidence: Evidence, line: Line, read: dict[str, list[ast.expr]], attributes: set[str]
) -> set[str] | None:
    """Which of these are tensors of low precision: by the running frame, else by what the operators were given.

    None where that leaves doubts. Autocast may have made the low precision itself: then there is none among them.
    """
    for frame in frames_here(sys._getframe(1), MAX_FRAMES):
        if frame.f_code is line.code:
            variables = locals_of(frame)
            values = {name: _value_of(nodes[0], variables) for name, nodes in read.items()}
            return {name for name, v in values.items() if isinstance(v, Tensor) and is_low_precision(v.dtype)}
    given = _given(evidence, line)
    low = [tensor for tensor in given if is_low_precision(tensor.dtype)]
    if not low and given:
        return set()
    return set(read) if len(low) == len(read) and len(given) - len(low) <= len(attributes) else None


def _value_of(node: ast.expr, variables: dict[str, Any]) -> object:
    """What a variable holds, or what is taken from it; no code of the script's is called."""
    if isinstance(node, ast.Name):
        return variables.get(node.id)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        held = _value_of(node.value, variables)
        return dict.get(held, node.slice.value) if isinstance(held, dict) else None
    if isinstance(node, ast.Attribute):
        return getattr(_value_of(node.value, variables), "__dict__", {}).get(node.attr)
    return None


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
