"""division-by-zero: x/0 or 0/0, in any precision.

What happens   a divisor is exactly 0: a count of an empty mask, the standard deviation of a constant sample, a sum of
               weights that are all 0. x/0 is Inf, 0/0 is NaN. rsqrt(0), reciprocal(0) and 0 ** -p are the same.
Why it hurts   one sample is enough: its NaN reaches the loss of the whole batch.
Instead        x / (d + eps), x / d.clamp(min=1), or leave the empty case out.
Not this       a divisor that only low precision turned into 0: see fp16-underflow.
"""

from __future__ import annotations

import torch

from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence, Operand
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.proposals import changed_operand, epsilon_fix, precision_fixes, smallest_epsilon

DIVISOR: dict[str, int] = {
    "div": 1, "true_divide": 1, "divide": 1, "remainder": 1, "fmod": 1, "reciprocal": 0, "rsqrt": 0,
    "addcdiv": 2, "floor_divide": 1,
}  # fmt: skip


@cause("division-by-zero")
def division_by_zero(evidence: Evidence) -> Finding | None:
    if evidence.given is not None or evidence.op.refused or (evidence.intended and not evidence.converts):
        return None
    position = divisor_position(evidence)
    name = words.operator(evidence)
    if position is None:
        scalar_zero = evidence.op.short_name in DIVISOR and 0.0 in evidence.scalars
        if not scalar_zero or evidence.is_finite_in_float32:
            return None
        return Finding(
            "division-by-zero",
            f"{name} {words.place(evidence)} divides by the plain number 0.",
            weight=50,
            evidence={"divisor": 0.0},
            proposals=(Proposal("guard-empty", words.region(evidence), f"check for 0 before: {words.code(evidence)}"),),
        )
    divisor = evidence.operands[position]
    numerator = None if position == 0 else evidence.operands[0].value
    count = (divisor.values == 0).sum().item()
    proposals = [_guard(evidence, position, divisor)]
    if divisor.values.is_floating_point():
        proposals.append(epsilon_fix(evidence, position, smallest_epsilon(evidence)))
    if evidence.is_cured_by_float32:
        proposals += precision_fixes(evidence)
    what = "0/0" if numerator == 0 else "x/0"
    return Finding(
        "division-by-zero",
        f"{name} {words.place(evidence)} divides by 0 ({what}): {count} of {divisor.values.numel()} divisors are 0, in "
        f"float32 as well.",
        weight=50,
        evidence={"divisor": divisor.stats.as_dict(), "zero_divisors": count, "numerator": numerator},
        proposals=tuple(proposals),
    )


def divisor_position(evidence: Evidence) -> int | None:
    """Which operand is 0 at the bad element and is divided by; None where none is."""
    name = evidence.op.short_name
    if name == "pow" and evidence.operands:
        exponent = evidence.scalars[0] if evidence.scalars else (evidence.operands[-1].value or 0.0)
        return 0 if exponent < 0 and _has_zero(evidence.operands[0]) else None
    position = DIVISOR.get(name)
    if position is None or position >= len(evidence.operands):
        return None
    return position if _has_zero(evidence.operands[position]) else None


def _has_zero(operand: Operand) -> bool:
    return bool((operand.contributing == 0).any())


def _guard(evidence: Evidence, position: int, divisor: Operand) -> Proposal:
    """A count wants `clamp(min=1)`; any other divisor its own case."""
    values = divisor.values.double()
    whole = bool((values == values.round()).all()) and bool((values >= 0).all())
    is_count = whole and (not divisor.values.is_floating_point() or bool((values >= 1).any()))
    if is_count:
        from ampguard.diagnose import rewrite

        line = rewrite.with_divisor(words.code(evidence), "{}.clamp(min=1)")
        return Proposal(
            "guard-empty",
            words.region(evidence),
            line or f"use a divisor of at least 1 (.clamp(min=1)) in: {words.code(evidence)}",
            trial=changed_operand(position, lambda t: t.clamp(min=1)),
        )
    low = smallest_epsilon(evidence)
    return Proposal(
        "clamp",
        words.region(evidence),
        f"keep the divisor away from 0 (.clamp(min={low:g})) in: {words.code(evidence)}",
        trial=changed_operand(position, lambda t: torch.where(t == 0, torch.full_like(t, low), t)),
    )
