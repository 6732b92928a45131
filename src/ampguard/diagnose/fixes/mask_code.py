"""The line that masks, with a fix in it: rows that it would leave without a key stay open, or its constant is finite."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampguard.capture.protocol.script_lines import is_script_code
from ampguard.capture.record import Line
from ampguard.diagnose import words
from ampguard.diagnose.code.rewrite import PRIMARY, unused_name, with_constant
from ampguard.diagnose.code.source import LineOfCode, called, called_name, line_of_code, shown
from ampguard.diagnose.code.text import joined_lines, spliced
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Proposal
from ampguard.numerics import dtype_name
from ampguard.replay.trace import TracedOp
from ampguard.replay.variants import Intervention, Variant

CASTS = frozenset({"to", "type", "type_as", "half", "bfloat16"})
MASKING = frozenset({"masked_fill", "where", "index_put"})
ASSIGNING = frozenset({"masked_fill", "index_put"})
"""What PyTorch makes of `u[mask] = -math.inf`, which differs between its versions."""


def open_rows(evidence: Evidence) -> Proposal | None:
    """The masking line, whose mask leaves alone the rows that it would close; None where the text does not tell how."""
    op = masking_operator(evidence)
    line = _line_of(op)
    call = evidence.capture(op.index) if op is not None and line is not None else None
    if op is None or line is None or call is None:
        return None
    masks, found = _true_masks(op, call.args), _condition(line, op.short_name, call.args)
    if masks is None or found is None:
        return None
    shown, condition = found
    written = line.source.written(condition)
    if isinstance(condition, PRIMARY) and not called(condition):
        first = name = written
    else:
        name = unused_name(line.source, "masked" if masks else "kept")
        first = f"({name} := {written})"
    rest = f"& ~{name}.all(-1, keepdim=True)" if masks else f"| ~{name}.any(-1, keepdim=True)"
    edit = (*line.source.span(condition), f"{first} {rest}")
    how = joined_lines(spliced(line.source.text, *line.source.span(shown), [edit]))
    place = op.place
    return Proposal(
        "fix-mask",
        words.region(evidence),
        words.marked(how, op, evidence.op),
        trial=lambda e: Variant(at_places={place: _with_rows_open(op.short_name, masks)}),
    )


def finite_constant(evidence: Evidence) -> Proposal | None:
    """The masking line with the lowest number of its type in place of -Inf; None where that is not written there."""
    op = masking_operator(evidence)
    line = _line_of(op)
    if op is None or line is None or not op.outputs:
        return None
    found = _call(line, op.short_name)
    receiver = found[0].func.value if found is not None and isinstance(found[0].func, ast.Attribute) else None
    if found is None and op.short_name in ASSIGNING and (index := _index(line)) is not None:
        (target,) = (t for t in index[0].targets if isinstance(t, ast.Subscript))
        receiver = target.value
    is_known = isinstance(receiver, ast.Name) and receiver.id not in line.source.torch_names
    dtype = f"{line.source.written(receiver)}.dtype" if receiver is not None and is_known else None
    dtype = dtype or f"torch.{dtype_name(op.outputs[0].dtype)}"
    how = with_constant(line, -math.inf, f"torch.finfo({dtype}).min")
    if how is None:
        return None

    def bounded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op.short_name == "index_put":
            return func(*args[:2], args[2].clamp(min=torch.finfo(args[2].dtype).min), *args[3:], **kwargs)
        output = func(*args, **kwargs)
        lowest = torch.finfo(output.dtype).min
        return output.clamp_(min=lowest) if output is args[0] else output.clamp(min=lowest)

    place = op.place
    return Proposal(
        "mask-value",
        words.region(evidence),
        words.marked(how, op, evidence.op),
        trial=lambda e: Variant(at_places={place: bounded}),
    )


def clamped_cast(evidence: Evidence, bound: str) -> str | None:
    """`scores + mask.to(scores.dtype).clamp(min=...)`, where the accused operator is the one cast that its line writes."""
    op = evidence.op
    line = line_of_code(op.line) if op.short_name == "_to_copy" and op.line is not None else None
    found = line.calls(lambda n: isinstance(n.func, ast.Attribute) and n.func.attr in CASTS) if line is not None else []
    if line is None or len(found) != 1:
        return None
    node, statement = found[0]
    end = line.source.span(node)[1]
    return line.edited(node, statement, [(end, end, f".clamp({bound})")])


def masking_operator(evidence: Evidence) -> TracedOp | None:
    """The operator that put -Inf where the mask is: the first of the chain that chooses between values."""
    links = reversed(evidence.chain.links)
    return next((link.op for link in links if link.op.short_name in MASKING), None)


def _line_of(op: TracedOp | None) -> LineOfCode | None:
    line: Line | None = op.line if op is not None else None
    return line_of_code(line) if line is not None and is_script_code(line.code) else None


def _true_masks(op: TracedOp, args: tuple[Any, ...]) -> bool | None:
    """Whether True of the condition means masked; None where neither side is -Inf."""
    if op.short_name == "masked_fill":
        return True
    if op.short_name == "index_put":
        return True if _is_minus_inf(args[2]) else None
    first, second = (_is_minus_inf(a) for a in args[1:3]) if len(args) > 2 else (False, False)
    return None if first == second else first


def _is_whole(written: Tensor, mask: Any) -> bool:
    """Whether the mask tells of each element: one of rows alone has no rows to be left open."""
    if isinstance(mask, (list, tuple)):
        mask = mask[0] if len(mask) == 1 else None
    return isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == written.shape


def _is_minus_inf(value: Any) -> bool:
    return bool((value == -math.inf).all()) if isinstance(value, Tensor) else value == -math.inf


def _with_rows_open(operator: str, masks: bool) -> Intervention:
    at = 0 if operator == "where" else 1
    is_closed: Callable[[Tensor], Tensor] = (
        (lambda c: c.all(-1, keepdim=True)) if masks else (lambda c: ~c.any(-1, keepdim=True))
    )

    def intervention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        condition = args[at][0] if isinstance(args[at], (list, tuple)) else args[at]
        if not isinstance(condition, Tensor) or not condition.dim() or condition.dtype != torch.bool:
            return func(*args, **kwargs)
        opened = condition & ~is_closed(condition) if masks else condition | is_closed(condition)
        new = [opened] if isinstance(args[at], (list, tuple)) else opened
        return func(*args[:at], new, *args[at + 1 :], **kwargs)

    return intervention


def _condition(line: LineOfCode, operator: str, args: tuple[Any, ...]) -> tuple[ast.stmt | ast.expr, ast.expr] | None:
    """(what is shown of the line, the condition in it) of the only call there that masks, or of `u[mask] = ...`."""
    found = _call(line, operator)
    if found is None:
        return _index(line) if operator in ASSIGNING and _is_whole(*args[:2]) else None
    call, statement = found
    function = call.func
    is_function = not isinstance(function, ast.Attribute) or _is_of_torch(line, function.value)
    at = 1 if operator == "masked_fill" and is_function else 0
    named = {k.arg: k.value for k in call.keywords}
    condition = call.args[at] if at < len(call.args) else named.get("mask", named.get("condition"))
    return (
        (shown(call, statement), condition)
        if condition is not None and not isinstance(condition, ast.Starred)
        else None
    )


def _index(line: LineOfCode) -> tuple[ast.Assign, ast.expr] | None:
    """(the statement, the mask) of `u[mask] = ...`."""
    statements = [s for _, s in line.parts if isinstance(s, ast.Assign) and s.lineno == s.end_lineno]
    targets = [(s, t) for s in statements for t in s.targets if isinstance(t, ast.Subscript)]
    if len(targets) != 1 or isinstance(targets[0][1].slice, (ast.Tuple, ast.Slice)):
        return None
    return targets[0][0], targets[0][1].slice


def _is_of_torch(line: LineOfCode, node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in line.source.torch_names


def _call(line: LineOfCode, operator: str) -> tuple[ast.Call, ast.stmt | None] | None:
    found = [
        (node, statement)
        for part, statement in line.parts
        for node in ast.walk(part)
        if isinstance(node, ast.Call) and called_name(node).rstrip("_") == operator
    ]
    return found[0] if len(found) == 1 else None
