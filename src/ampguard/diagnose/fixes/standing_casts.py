"""Casts to low precision that stay what they are when a model's weights, or autocast, change their type.

`x.half()` and `x.to(torch.float16)` stay; so does `x.type(self.dtype)` where that is a type that was once chosen. What is
cast to the type of something else (`h.type(x.dtype)`) follows. The operators tell which lines did cast; their text, how.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

import torch
from torch import nn

from ampguard import compat
from ampguard.capture.events.operands import leaves
from ampguard.capture.protocol.script_lines import is_script_code
from ampguard.capture.record import Line, RootCall
from ampguard.diagnose.code.assigned import last_assigned_to
from ampguard.diagnose.code.source import LineOfCode, line_of_code
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.fixes.script_casts import CONVERTING, METHODS, is_low_type
from ampguard.numerics import is_low_precision
from ampguard.replay.trace import Trace, TracedOp

CHOSEN = ("type", "half", "prec", "16")
"""Parts of the names of what holds a type that a script has chosen."""

OPTIONS = frozenset({"self", "cls", "args", "cfg", "config", "conf", "opt", "opts", "options", "hparams"})


def standing_casts(evidence: Evidence, everywhere: bool = False) -> tuple[Line, ...]:
    """Lines of the script that cast to low precision in the step, and will after its autocast or its weights are changed.

    Those that have to do with the bad value: that went into it, or into what was computed from it.
    `everywhere`: all of them, as those beside it feed weights that are no more of that type.
    """
    connected = None if everywhere else _connected(evidence.trace, evidence.op)
    modules = {id(m): m for e in evidence.events() if isinstance(e, RootCall) for m in modules_of(e)}
    found: dict[Line, None] = {}
    for op in evidence.trace.ops:
        is_asked = _is_cast_down(op) and op.line not in found and (connected is None or op.index in connected)
        if is_asked and op.line is not None and stands(op.line, modules.get(op.owner or 0)):
            found[op.line] = None
    return tuple(found)


def stands(line: Line, module: nn.Module | None) -> bool:
    """Whether the text of a line casts to a type that it does not take from another tensor. `module`: what `self` is."""
    code = line_of_code(line)
    calls = code.calls(lambda call: isinstance(call.func, ast.Attribute)) if code is not None else []
    return code is not None and any(_is_standing(call, code, module) for call, _ in calls)


def modules_of(root: RootCall) -> Iterable[nn.Module]:
    """The modules of a call, and of those that it was given (`criterion(model, batch)`)."""
    given = [leaf for leaf in leaves((root.args, root.kwargs)) if isinstance(leaf, nn.Module)]
    return [part for module in (root.module, *given) for part in compat.all_modules(module)]


def _is_cast_down(op: TracedOp) -> bool:
    if op.short_name != "_to_copy" or op.in_backward or op.line is None or not op.inputs or not op.outputs:
        return False
    given = op.inputs[0].dtype
    is_wide = given.is_floating_point and not is_low_precision(given)
    return is_wide and is_low_precision(op.outputs[0].dtype) and is_script_code(op.line.code)


def _connected(trace: Trace, op: TracedOp) -> set[int]:
    """What went into an operator's result, and into whatever was computed from that."""
    found = {op.index}
    for later in trace.ops[op.index + 1 :]:
        if any(t.made_by is not None and t.made_by[0] in found for t in later.inputs):
            found.add(later.index)
    for earlier in reversed(trace.ops):
        if earlier.index in found:
            found |= {t.made_by[0] for t in earlier.inputs if t.made_by is not None}
    return found


def _is_standing(call: ast.Call, code: LineOfCode, module: nn.Module | None) -> bool:
    assert isinstance(call.func, ast.Attribute)
    name, given = call.func.attr, [*call.args, *(k.value for k in call.keywords if k.arg in (None, "dtype"))]
    if name in METHODS and not given:
        return True
    return name in CONVERTING and any(_is_chosen(argument, code, call.lineno, module) for argument in given)


def _is_chosen(node: ast.expr, code: LineOfCode, line: int, module: nn.Module | None) -> bool:
    """Whether an expression is a low precision that was chosen, and does not follow from a tensor."""
    if is_low_type(node):
        return True
    if isinstance(node, ast.Name):
        statement = last_assigned_to(code.source, node.id, line)
        if statement is not None and statement.value is not None:
            return _is_chosen(statement.value, code, statement.lineno, module)
        return _may_hold_a_type(node.id)
    if not isinstance(node, ast.Attribute):
        return False
    base = node.value
    if isinstance(base, ast.Name) and base.id == "self" and module is not None:
        held = vars(module).get(node.attr)
        return isinstance(held, torch.dtype) and is_low_precision(held)  # a property asks the weights
    if node.attr == "dtype":  # of a tensor, if not of the options
        holder = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
        return holder in OPTIONS
    return _may_hold_a_type(node.attr)


def _may_hold_a_type(name: str) -> bool:
    return any(part in name.lower() for part in CHOSEN)
