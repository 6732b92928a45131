"""`cross_entropy` over targets of which none counts, written so that it is 0 in place of 0/0."""

from __future__ import annotations

import ast
from typing import Any

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.record import RootCall
from ampguard.diagnose.code import source as source_code
from ampguard.diagnose.evidence import Evidence

CALLS = frozenset({"cross_entropy", "nll_loss"})
USUAL_IGNORED = "-100"
TARGET, WEIGHT, IGNORE_INDEX = 1, 2, 4
"""Positions in the operators' arguments."""
REPEATED = (ast.Name, ast.Attribute)
"""What can stand in the line twice: naming it computes nothing."""


def are_all_ignored(args: tuple[Any, ...]) -> bool:
    """Whether every target is `ignore_index`. `args`: the operator's arguments."""
    target = args[TARGET] if len(args) > IGNORE_INDEX else None
    return isinstance(target, Tensor) and bool((target == args[IGNORE_INDEX]).all())


def zero_weights(evidence: Evidence) -> Tensor | None:
    """The class weights, where all of them are 0 and targets are not ignored besides."""
    call = evidence.capture(evidence.op.index)
    if call is None or len(call.args) <= IGNORE_INDEX or are_all_ignored(call.args):
        return None
    weight = call.args[WEIGHT]
    return weight if isinstance(weight, Tensor) and not bool((weight != 0).any()) else None


def written_safely(evidence: Evidence) -> str | None:
    """The line with a loss that is 0 where no target counts; None where the text does not tell how."""
    return averaged_by_hand(evidence) or _asked_first(evidence)


def _asked_first(evidence: Evidence) -> str | None:
    """`loss = criterion(out, y) if (y != criterion.ignore_index).any() else out.sum() * 0`, of a module that is called."""
    line = source_code.line_of_code(evidence.op.line) if evidence.op.line is not None else None
    call = evidence.capture(evidence.op.index)
    if line is None or call is None or not are_all_ignored(call.args):
        return None
    calls = [
        (part, statement)
        for top, statement in line.parts
        for part in ast.walk(top)
        if isinstance(part, ast.Call) and len(part.args) == 2 and not part.keywords and source_code.called(top)
    ]
    if len(calls) != 1:
        return None
    node, statement = calls[0]
    if not all(isinstance(part, REPEATED) for part in (node.func, *node.args)) or not _is_a_criterion(evidence):
        return None
    source = line.source
    criterion, scores, target = (source.written(part) for part in (node.func, *node.args))
    start, end = source.span(node)
    edits = [
        (start, start, "("),
        (end, end, f" if ({target} != {criterion}.ignore_index).any() else {scores}.sum() * 0)"),
    ]
    return line.edited(node, statement, edits)


def _is_a_criterion(evidence: Evidence) -> bool:
    """Whether the accused operator ran in one of PyTorch's own losses, that its line called as a module."""
    root = next((e for e in evidence.events() if e.index == evidence.op.event and isinstance(e, RootCall)), None)
    owner = (
        next((m for m in compat.all_modules(root.module) if id(m) == evidence.op.owner), None)
        if root is not None
        else None
    )
    return isinstance(owner or (root.module if root is not None else None), (nn.CrossEntropyLoss, nn.NLLLoss))


def averaged_by_hand(evidence: Evidence) -> str | None:
    """The line with the sum of the losses divided by the number of targets that count, at least 1.

    None where the line has no such call of its own, or one that weights classes, smooths labels or does not average.
    """
    line = source_code.line_of_code(evidence.op.line) if evidence.op.line is not None else None
    if line is None:
        return None
    calls = line.calls(lambda call: source_code.called_name(call) in CALLS)
    if len(calls) != 1:
        return None
    call, statement = calls[0]
    named = {k.arg: k.value for k in call.keywords}
    if len(call.args) != 2 or not named.keys() <= {"ignore_index"}:
        return None
    source = line.source
    ignored = source.written(named["ignore_index"]) if named else USUAL_IGNORED
    start, end = source.span(call)
    target = source.written(call.args[1])
    edits = [
        (start, start, "("),
        (end - 1, end - 1, ', reduction="sum"'),
        (end, end, f" / ({target} != {ignored}).sum().clamp(min=1))"),
    ]
    return line.edited(call, statement, edits)
