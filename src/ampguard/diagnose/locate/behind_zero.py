"""A zero that an overflow has left: x / Inf is 0, and 0 / 0, or its logarithm, is where the bad values begin to show.

The chain of bad values ends behind it, for all operands there are finite. In float32 nothing overflows and nothing is 0. Where
float32 itself overflows (a log-sum-exp by hand), the step is finite once a large number stands in the infinity's place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampguard.capture.root_calls.trees import map_tensors
from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.fixes.proposals import spelled
from ampguard.diagnose.hidden_overflow import overflow_behind
from ampguard.diagnose.locate.chain import Chain, Link
from ampguard.diagnose.locate.on_purpose import makes_infinity_on_purpose
from ampguard.numerics import POS_INF, is_low_precision
from ampguard.replay.trace import Trace, TracedOp
from ampguard.replay.variants import Variant

MOST_TRIED = 3
"""Infinities in whose place a number is put, one after the other."""
LARGE = 0.8
"""That number, as a power of the largest of its type."""


class HiddenOverflow(Evidence):
    """The evidence of an overflow of which an operator with finite results has made zeros."""

    shown_at: Link
    """Where the bad values begin to show."""

    @property
    def remark(self) -> str:
        op = self.shown_at.op
        where = f" at {words.place_of(op.line.location())}" if op.line is not None else ""
        return (
            f" The infinity itself goes no further: what is computed with it is 0, and {words.name(op)}{where} makes "
            f"{spelled(words.kind(self.shown_at))} of that."
        )


def hidden_overflow_behind(evidence: Evidence) -> Evidence | None:
    """The overflow that has made an operand of the accused operator 0; None where there is none."""
    head = evidence.op
    if evidence.replayer is None or evidence.given is not None or evidence.intended or head.in_backward:
        return None
    if any(t.bad is not None for t in head.inputs):
        return None
    before = _behind(evidence.trace, head)
    if not any(made.bad is not None for index in before for made in evidence.trace.ops[index].outputs):
        return None
    if not any(bool((operand.contributing == 0).any()) for operand in evidence.float_operands):
        return None
    op = _of_low_precision(evidence, before) or _of_any_precision(evidence, before)
    if op is None:
        return None
    result, bad = next((i, made.bad) for i, made in enumerate(op.outputs) if made.bad is not None)
    link = Link(op, result, int(bad.flat[0]), int(bad.kinds[0]))
    overflow = HiddenOverflow(evidence.bad, Chain([*evidence.chain.links, link]), evidence.outcome, evidence.replayer)
    overflow.shown_at = evidence.link
    return overflow


def _of_low_precision(evidence: Evidence, before: set[int]) -> TracedOp | None:
    """The first result that is infinite in low precision alone, where computing it in float32 cures the step."""
    if not evidence.ran_in_low_precision or not evidence.is_finite_in_float32_step or evidence.step_in_float32 is None:
        return None
    found = overflow_behind(evidence.outcome, evidence.step_in_float32, among=before)
    return found[0] if found is not None and _cures(evidence, found[0]) else None


def _of_any_precision(evidence: Evidence, before: set[int]) -> TracedOp | None:
    """The first operator that made +Inf of finite numbers, where a large number in its place cures the step."""
    assert evidence.replayer is not None
    tried = 0
    for op in (evidence.trace.ops[index] for index in sorted(before)):
        if op.in_backward or any(given.bad is not None for given in op.inputs) or not _makes_infinity(op):
            continue
        tried += 1
        if tried > MOST_TRIED:
            break
        try:
            replayed = evidence.replayer.run(
                Variant(interventions={evidence.trace.run_key(op.index): _within_range}), traced=False
            )
        except RuntimeError:
            continue
        if not replayed.is_bad:
            return op
    return None


def _makes_infinity(op: TracedOp) -> bool:
    """Whether a result holds +Inf that nobody wrote there."""
    return any(
        made.bad is not None
        and bool((made.bad.kinds == POS_INF).any())
        and not makes_infinity_on_purpose(Link(op, position, None, POS_INF))
        for position, made in enumerate(op.outputs)
    )


def _within_range(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operator gives, with a number in the place of +Inf some of which can still be added up."""

    def limited(result: Tensor) -> Tensor:
        if not result.is_floating_point():
            return result
        within = result.where(~result.isposinf(), torch.finfo(result.dtype).max ** LARGE)
        return result.copy_(within) if any(given is result for given in args) else within  # (written in place)

    return map_tensors(func(*args, **kwargs), limited)


def _cures(evidence: Evidence, op: TracedOp) -> bool:
    """Whether the step is finite once the line of this operator is computed in float32: an infinity may leave zeros that are
    meant, and what fails behind those is another thing."""
    if op.line is None or evidence.replayer is None:
        return False
    if op.owner is None:
        variant = Variant(fp32_lines=frozenset({(op.line.code.co_filename, op.line.number)}))
    else:  # its module in float32 would cure what fails behind it as well
        key = evidence.trace.run_key(op.index)
        variant = Variant(interventions={key: _in_float32})
    try:
        return not evidence.replayer.run(variant, traced=False).is_bad
    except RuntimeError:
        return False


def _in_float32(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = (
        map_tensors(tree, lambda t: t.float() if is_low_precision(t.dtype) else t) for tree in (args, kwargs)
    )
    return func(*args, **kwargs)


def _behind(trace: Trace, head: TracedOp) -> set[int]:
    """The numbers of all operators whose results went into what this one was given."""
    waiting, found = [head], set[int]()
    while waiting:
        made = {given.made_by[0] for given in waiting.pop().inputs if given.made_by is not None} - found
        found |= made
        waiting += [trace.ops[index] for index in made]
    return found
