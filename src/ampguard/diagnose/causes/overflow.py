"""overflow: a result is beyond float32 too.

What happens   exp(89) is beyond float32's 3.4e38, and so are powers and products of large numbers.
Why it hurts   no precision of the training cures it: the values themselves have run away.
Instead        the stable form (logsumexp, softplus, log_softmax), a clamp of the exponent, or a smaller learning rate where
               the values grew from step to step.
Not this       a result that float32 holds: see fp16-overflow.
"""

from __future__ import annotations

import math

import torch

from ampguard.diagnose import stable, words
from ampguard.diagnose.causes.division_by_zero import divisor_position
from ampguard.diagnose.causes.domain_error import outside_domain
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.proposals import changed_operand, clamp_fix

EXPONENTIALS = frozenset({"exp", "expm1", "exp2", "sinh", "cosh"})


@cause("overflow")
def overflow(evidence: Evidence) -> Finding | None:
    if evidence.given is not None or evidence.intended or evidence.op.refused or evidence.is_finite_in_float32:
        return None
    if not evidence.float_operands or divisor_position(evidence) is not None or outside_domain(evidence) is not None:
        return None
    if any(o.values.numel() == 0 for o in evidence.operands):
        return None
    if evidence.link.kind == 1 and not _grew_on_the_way(evidence):
        return None
    wide = evidence.element(evidence.in_float64)
    peak = max((o.stats.max_abs or 0.0) for o in evidence.float_operands)
    name = words.operator(evidence)
    shown = "beyond float64 as well" if wide is None or not math.isfinite(wide) else f"{words.number(wide)} in float64"
    proposals: list[Proposal] = list(stable.proposals(evidence))
    if evidence.op.short_name in EXPONENTIALS:
        high = 10.0 if evidence.precision == torch.float16 else 80.0
        proposals.append(clamp_fix(evidence, 0, None, high))
    else:
        proposals.append(_bounded_operand(evidence, peak))
    return Finding(
        "overflow",
        f"{name} {words.place(evidence)} leaves float32's range (3.4e38): its operands reach {words.number(peak)}, its result "
        f"is {shown}.",
        weight=45,
        evidence={"max_abs_operand": peak, "result_fp64": wide if wide is None or math.isfinite(wide) else str(wide)},
        proposals=tuple(proposals),
    )


def _grew_on_the_way(evidence: Evidence) -> bool:
    """A NaN from finite operands is an overflow only where float64 survives (Inf - Inf inside the operator)."""
    wide = evidence.element(evidence.in_float64)
    return wide is not None and math.isfinite(wide)


def _bounded_operand(evidence: Evidence, peak: float) -> Proposal:
    """The largest power of ten to which the operand can be clamped so that the result keeps well inside float32."""
    position = max(range(len(evidence.operands)), key=lambda i: evidence.operands[i].stats.max_abs or 0.0)
    bound = 10.0 ** math.floor(math.log10(max(peak, 10.0)))
    while bound > 1e-3 and not _fits_with(evidence, position, bound):
        bound /= 10
    return Proposal(
        "clamp",
        words.region(evidence),
        f"bound the operand of {words.operator(evidence)} (.clamp(-{bound:g}, {bound:g})) in: {words.code(evidence)}",
        trial=changed_operand(position, lambda t: t.clamp(-bound, bound)),
    )


def _fits_with(evidence: Evidence, position: int, bound: float) -> bool:
    call = evidence.call
    if call is None:
        return True
    target = call.tensors[position]
    args = tuple(a.double().clamp(-bound, bound) if a is target else a for a in call.args)
    args = tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    try:
        result = call.func(*args, **call.kwargs)
    except RuntimeError:
        return True
    result = result[0] if isinstance(result, (tuple, list)) else result
    return bool((result.abs() < 1e30).all())
