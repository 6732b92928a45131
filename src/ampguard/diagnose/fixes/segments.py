"""Segments of a reduction that have no elements: a graph without nodes, a word without frames."""

from __future__ import annotations

import ast
import math
from typing import Any

import torch
from torch import Tensor

from ampguard.diagnose import words
from ampguard.diagnose.code import accused, rewrite
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Proposal
from ampguard.diagnose.fixes.proposals import at_the_head, changed_result


def empty_segment(evidence: Evidence) -> int | None:
    """Which segment without elements the bad element of a `segment_reduce` stands for; None where it stands for none."""
    call, flat = evidence.call, evidence.flat
    if evidence.op.short_name != "segment_reduce" or call is None or flat is None or call.kwargs.get("axis", 0) != 0:
        return None
    lengths = _lengths(call.kwargs)
    rows = evidence.op.outputs[0].shape
    if lengths is None or not rows or rows[0] != len(lengths):
        return None
    segment = flat // math.prod(rows[1:])
    return segment if int(lengths[segment]) == 0 else None


def _lengths(options: dict[str, Any]) -> Tensor | None:
    lengths, offsets = options.get("lengths"), options.get("offsets")
    if lengths is None and isinstance(offsets, Tensor):
        lengths = offsets.diff()
    return lengths if isinstance(lengths, Tensor) and lengths.dim() == 1 else None


def beginning_at_zero(evidence: Evidence) -> Proposal:
    """Let such a segment be 0: a mean or a sum may begin at 0, the largest and the smallest of nothing may not."""
    call = evidence.call
    begins = call is not None and len(call.args) > 1 and call.args[1] in ("mean", "sum")
    shown = _with_initial(evidence) if begins else None
    advice = "leave out segments that have no elements, or let them be 0"
    how = f"{advice}: {shown}" if shown is not None else f"{advice}, in: {words.code(evidence)}"
    trial = at_the_head(_begin_at_zero) if begins else changed_result(_zero_where_bad)
    return Proposal("guard-empty", words.region(evidence), how, trial=trial)


def _begin_at_zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **{**kwargs, "initial": 0.0})


def _zero_where_bad(result: Tensor) -> Tensor:
    return torch.where(result.isfinite(), result, torch.zeros_like(result))


def _with_initial(evidence: Evidence) -> str | None:
    """The line with `initial=0` for the accused call; None where the text does not tell which it is."""
    line = accused.line_of(evidence)
    calls = line.expressions("segment_reduce", accused.is_in_place(evidence.op)) if line is not None else []
    chosen = accused.accused_alone(evidence, calls)
    if line is None or chosen is None or not isinstance(chosen.node, ast.Call) or not chosen.arguments:
        return None
    if any(keyword.arg in ("initial", None) for keyword in chosen.node.keywords):
        return None
    end = line.source.span(chosen.node)[1] - 1
    edit = (end, end, ", initial=0")
    return rewrite.with_changes(line, [(chosen, chosen.arguments[0])], lambda source, operand, expression: [edit])
