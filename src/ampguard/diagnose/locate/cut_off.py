"""A derivative that is NaN and reaches no parameter, where PyTorch's anomaly detection has ended the script over it.

Without anomaly detection it is no failure: a ReLU that is 0 there, or a mask, keeps it from every weight. With it the
backward pass raises, so the place is told. Fixes are not tried: the gradients are finite with and without them.
"""

from __future__ import annotations

import dataclasses

from ampguard.capture.record import BadResult
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import find_cause
from ampguard.diagnose.fixes.minimal import advice
from ampguard.diagnose.gradients import GradientEvidence
from ampguard.diagnose.investigate import incident_of, unexplained
from ampguard.diagnose.locate.slicing import chain_to
from ampguard.incident import Fix, Incident
from ampguard.numerics import NAN
from ampguard.replay.rebuild import Replayer
from ampguard.replay.trace import Trace, TracedOp

ALONE = (
    " It reaches no parameter, all gradients of the step are finite: it was PyTorch's anomaly detection that ended the "
    "backward pass over it. Without anomaly detection training goes on."
)


def cut_off_derivative(bad: BadResult, replayer: Replayer, rank: int) -> tuple[Incident, Evidence] | None:
    """What anomaly detection stumbled over; None where no derivative of the replay is NaN. One traced replay."""
    outcome = replayer.run()
    found = _first_nan(outcome.trace)
    if outcome.is_bad or found is None:
        return None
    evidence = GradientEvidence(bad, chain_to(outcome.trace, *found, NAN), outcome, None)
    finding = find_cause(evidence) or unexplained(evidence)
    finding = dataclasses.replace(finding, explanation=finding.explanation + ALONE)
    fixes = tuple(Fix(p.action, p.target, p.how or advice(evidence, [evidence.op])) for p in finding.proposals)
    return incident_of(evidence, finding, fixes, rank, rung="replay"), evidence


def _first_nan(trace: Trace) -> tuple[TracedOp, int, int] | None:
    """The first NaN of the backward pass: which operator made it, in which of its results, where in that."""
    for op in trace.ops:
        for number, out in enumerate(op.outputs if op.in_backward else []):
            if out.bad is not None and bool((is_nan := out.bad.kinds == NAN).any()):
                return op, number, int(out.bad.flat[is_nan][0])
    return None
