"""A zero that an overflow has left: x / Inf is 0, and 0 / 0, or its logarithm, is where the bad values begin to show.

The chain of bad values ends behind it, for all operands there are finite. In float32 nothing overflows and nothing is 0.
"""

from __future__ import annotations

from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.fixes.proposals import spelled
from ampguard.diagnose.locate.chain import Chain, Link
from ampguard.diagnose.locate.slicing import makes_infinity_on_purpose
from ampguard.numerics import NAN, is_low_precision
from ampguard.replay.trace import Trace, TracedOp
from ampguard.replay.variants import Variant


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
    """The overflow that has made an operand of the accused operator 0, in low precision alone; None where there is none."""
    head = evidence.op
    if evidence.replayer is None or evidence.given is not None or evidence.intended or head.in_backward:
        return None
    if not evidence.ran_in_low_precision or any(t.bad is not None for t in head.inputs):
        return None
    if not any(bool((operand.contributing == 0).any()) for operand in evidence.float_operands):
        return None
    link = _first_overflow(evidence.trace, head)
    if link is None or not evidence.is_finite_in_float32_step:
        return None
    outcome = evidence.step_in_float32
    twin = outcome.trace.aligned(link.op) if outcome is not None else None
    if twin is None or any(made.bad is not None for made in twin.outputs) or not _cures(evidence, link.op):
        return None
    chain = Chain([*evidence.chain.links, link])
    found = HiddenOverflow(evidence.bad, chain, evidence.outcome, evidence.replayer)
    found.shown_at = evidence.link
    return found


def _cures(evidence: Evidence, op: TracedOp) -> bool:
    """Whether the step is finite once the line of this operator is computed in float32: an infinity may leave zeros that are
    meant, and what fails behind those is another thing."""
    if op.line is None or evidence.replayer is None:
        return False
    line = op.line.code.co_filename, op.line.number
    try:
        return not evidence.replayer.run(Variant(fp32_lines=frozenset({line})), traced=False).is_bad
    except RuntimeError:
        return False


def _first_overflow(trace: Trace, head: TracedOp) -> Link | None:
    """The earliest operator behind `head` with an infinity of low precision that its operands do not have."""
    waiting, seen = [head], {head.index}
    found: Link | None = None
    while waiting:
        for given in waiting.pop().inputs:
            if given.made_by is None or given.made_by[0] in seen:
                continue
            op = trace.ops[given.made_by[0]]
            seen.add(op.index)
            waiting.append(op)
            link = _overflow_of(op)
            if link is not None and (found is None or op.index < found.op.index):
                found = link
    return found


def _overflow_of(op: TracedOp) -> Link | None:
    if any(given.bad is not None for given in op.inputs):
        return None
    for result, made in enumerate(op.outputs):
        if made.bad is None or not is_low_precision(made.dtype) or bool((made.bad.kinds == NAN).any()):
            continue
        link = Link(op, result, int(made.bad.flat[0]), int(made.bad.kinds[0]))
        return None if makes_infinity_on_purpose(link) else link
    return None
