"""A divisor that is a root of 0: an epsilon beside the root cures the quotient, only one under it the derivative too.

sqrt has no derivative at 0. `x / (s.sqrt() + eps)` and `x / s.sqrt().clamp(min=eps)` are finite there, and their gradients
are NaN: 0 times Inf.
"""

from __future__ import annotations

import dataclasses

from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Proposal
from ampguard.diagnose.fixes.proposals import epsilon_fix, smallest_epsilon
from ampguard.diagnose.locate import lineage
from ampguard.diagnose.locate.chain import Chain, Link
from ampguard.replay.trace import TracedOp


def under_the_root(evidence: Evidence, divisor: int) -> list[Proposal]:
    """An epsilon under the root that made a divisor, where the step goes on to differentiate it."""
    maker = lineage.maker(evidence.trace, evidence.op, divisor)
    if evidence.bad.mode != "train" or maker is None or not _is_root(maker):
        return []
    root = Evidence(
        evidence.bad, Chain([Link(maker, 0, None, evidence.link.kind)]), evidence.outcome, evidence.replayer
    )
    low = evidence.low_precision_in_use is not None
    found = epsilon_fix(root, 0, smallest_epsilon(evidence) if low else 1e-12)
    trial = found.trial
    how = words.marked(found.how, maker, evidence.op)
    return [dataclasses.replace(found, how=how, trial=lambda _: trial(root))] if trial is not None else []


def _is_root(op: TracedOp) -> bool:
    return op.short_name == "sqrt" or (op.short_name == "pow" and any(0 < number < 1 for number in op.scalars))
