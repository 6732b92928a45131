"""Data with gaps that the loss masks too late: behind the operator whose derivative multiplies the gap by 0.

`((prediction - target) ** 2)[ok].mean()` never sees the NaN of a missing target, and its derivative is 0 * NaN. The line to
change is where the data meets what is differentiated: mask it there, and the loss stays what it is.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Proposal
from ampguard.diagnose.gradients import GradientEvidence
from ampguard.diagnose.locate.chain import Chain, Link
from ampguard.replay.trace import TracedOp
from ampguard.replay.variants import CodePlace, Variant

_SIGNS: dict[str, type[ast.operator]] = {"sub": ast.Sub, "add": ast.Add, "mul": ast.Mult, "div": ast.Div}


@dataclass(frozen=True, slots=True)
class Meeting:
    """The first operator of the chain that was given finite numbers beside the data with gaps, at this argument."""

    evidence: Evidence
    position: int
    places: tuple[CodePlace, ...]

    @property
    def op(self) -> TracedOp:
        return self.evidence.op

    @property
    def has_infinities(self) -> bool:
        return bool(torch.isinf(self.evidence.float_operands[self.position].values).any())

    @property
    def code(self) -> str:
        return words.code_at(self.op.line) or "the loss"


def meeting_of(evidence: Evidence) -> Meeting | None:
    """Where data that the loss masks away meets what is differentiated; None where the loss itself is bad."""
    if not isinstance(evidence, GradientEvidence) or evidence.replayer is None or not evidence.bad.is_of_gradients:
        return None
    loss = evidence.outcome.loss
    if loss is None or not math.isfinite(loss):
        return None
    for link in reversed(evidence.chain.links):
        is_read_behind = link.op.in_backward  # by a derivative first: its function was given it as well
        op = evidence.trace.ops[link.op.forward] if is_read_behind and link.op.forward is not None else link.op
        if op.in_backward:
            return None
        here = Evidence(evidence.bad, Chain([Link(op, 0, None, link.kind)]), evidence.outcome, evidence.replayer)
        operands = here.float_operands
        bad = [not bool(torch.isfinite(operand.values).all()) for operand in operands]
        if op.line is not None and bad in ([True, False], [False, True]) and all(o.values.dim() for o in operands):
            return Meeting(here, bad.index(True), (op.place, link.op.place) if is_read_behind else (op.place,))
        if is_read_behind:
            return None
    return None


def masked_before(meeting: Meeting) -> Proposal:
    """Put 0 in the place of the gaps at that operator and nowhere else."""

    def filled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*map(_filled, args), **kwargs)

    operand = _operand_in(meeting)
    infinite = ", posinf=0.0, neginf=0.0" if meeting.has_infinities else ""
    what = f"torch.nan_to_num({operand}{infinite})" if operand else "torch.nan_to_num of it"
    return Proposal(
        "stable-form",
        words.region(meeting.evidence),
        f"fill the gaps before they are computed with, and mask the result as it is masked now: {what} in place of "
        f"{operand or 'what holds them'} in: {meeting.code}",
        trial=lambda e: Variant(at_places=dict.fromkeys(meeting.places, filled)),
    )


def _filled(value: Any) -> Any:
    is_number = isinstance(value, Tensor) and value.is_floating_point()
    return torch.nan_to_num(value, 0.0, 0.0, 0.0) if is_number else value


def _operand_in(meeting: Meeting) -> str | None:
    """How the line writes that operand, where only one expression of it can be meant."""
    sign = _SIGNS.get(meeting.op.short_name)
    try:
        nodes = list(ast.walk(ast.parse(meeting.code)))
    except SyntaxError:
        return None
    found = [n for n in nodes if sign is not None and isinstance(n, ast.BinOp) and isinstance(n.op, sign)]
    if len(found) == 1:
        return ast.unparse(found[0].right if meeting.position else found[0].left)
    name = meeting.op.short_name
    calls = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func).rpartition(".")[2] == name]
    if len(calls) == 1 and len(calls[0].args) > meeting.position:
        return ast.unparse(calls[0].args[meeting.position])
    return None
