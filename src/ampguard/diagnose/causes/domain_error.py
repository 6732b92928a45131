"""domain-error: a function outside its domain.

What happens   log of 0 is -Inf and of a negative number NaN; sqrt of a negative number is NaN (a variance computed as
               E[x^2] - E[x]^2 can be slightly below 0); acos and asin beyond 1, a fractional power of a negative number.
Why it hurts   the operand is off by a rounding error, the result is NaN. A later `* 0` does not help: NaN * 0 is NaN.
Instead        clamp the operand into the domain, or use the stable form (log_softmax, logsigmoid, logsumexp,
               binary_cross_entropy_with_logits).
Not this       an operand that only low precision flushed to 0: see fp16-underflow.
"""

from __future__ import annotations

import math

from ampguard.diagnose import stable, words
from ampguard.diagnose.causes.division_by_zero import divisor_position
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.proposals import clamp_fix, precision_fixes, spelled

EDGE = 1e-6
DOMAINS: dict[str, tuple[float | None, float | None, bool]] = {
    "log": (0.0, None, True), "log2": (0.0, None, True), "log10": (0.0, None, True), "log1p": (-1.0, None, True),
    "sqrt": (0.0, None, False), "rsqrt": (0.0, None, True), "acos": (-1.0, 1.0, False), "asin": (-1.0, 1.0, False),
    "acosh": (1.0, None, False), "atanh": (-1.0, 1.0, True), "logit": (0.0, 1.0, True), "erfinv": (-1.0, 1.0, True),
    "special_logit": (0.0, 1.0, True), "xlogy": (0.0, None, True), "lgamma": (0.0, None, True),
    "digamma": (0.0, None, True), "special_ndtri": (0.0, 1.0, True), "pow": (0.0, None, False),
}  # fmt: skip
"""Lower end, upper end, and whether the ends themselves are outside."""


@cause("domain-error")
def domain_error(evidence: Evidence) -> Finding | None:
    if evidence.given is not None or evidence.intended or evidence.op.refused or evidence.is_finite_in_float32:
        return None
    if divisor_position(evidence) is not None or not evidence.float_operands:
        return None
    found = outside_domain(evidence)
    if found is None:
        return None
    position, value, low, high = found
    name = words.operator(evidence)
    span = f"{'-Inf' if low is None else f'{low:g}'} to {'+Inf' if high is None else f'{high:g}'}"
    proposals: list[Proposal] = list(stable.proposals(evidence))
    if low is not None or high is not None:
        edge = EDGE if evidence.precision is None else 1e-3
        proposals.append(
            clamp_fix(evidence, position, None if low is None else low + edge, None if high is None else high - edge)
        )
    if evidence.is_cured_by_float32:
        proposals += precision_fixes(evidence)
    return Finding(
        "domain-error",
        f"{name} {words.place(evidence)} was given {spelled_out(value, low, high)}, outside its domain ({span}), and gives "
        f"{spelled(evidence.kind)} in any precision.",
        weight=50,
        evidence={"operand_value": value, "operand": evidence.operands[position].stats.as_dict()},
        proposals=tuple(proposals),
    )


def outside_domain(evidence: Evidence) -> tuple[int, float, float | None, float | None] | None:
    """(operand, its value at the bad element, lower end, upper end) where a finite operand has no finite image."""
    name = evidence.op.short_name
    if name == "pow" and not _has_fractional_exponent(evidence):
        return None
    position = 1 if name == "xlogy" and len(evidence.operands) > 1 else 0
    if position >= len(evidence.operands):
        return None
    value = evidence.operands[position].value
    if value is None or not math.isfinite(value):
        return None
    low, high, open_ends = DOMAINS.get(name, (None, None, False))
    if name in DOMAINS:
        below = low is not None and (value <= low if open_ends else value < low)
        above = high is not None and (value >= high if open_ends else value > high)
        return (position, value, low, high) if below or above else None
    wide = evidence.element(evidence.in_float64)
    if any(math.isinf(s) for s in evidence.scalars):
        return None
    if wide is not None and math.isnan(wide) and len(evidence.float_operands) == 1:
        return position, value, None, None
    return None


def _has_fractional_exponent(evidence: Evidence) -> bool:
    """A negative base is outside the domain of a fractional power only, whose result is then NaN."""
    if evidence.kind != "nan" or evidence.op.name == "aten.pow.Scalar":
        return evidence.kind == "nan"
    exponent = evidence.scalars[0] if evidence.scalars else evidence.operands[-1].value if evidence.operands else None
    return exponent is not None and math.isfinite(exponent) and exponent != int(exponent)


def spelled_out(value: float, low: float | None, high: float | None) -> str:
    """A number as a person would write it, with so many digits that it can be told from the ends of the domain.

    >>> spelled_out(1.0000001, -1.0, 1.0), spelled_out(0.0, 0.0, None), spelled_out(-1.24, 0.0, None)
    ('1.0000001', '0', '-1.24')
    """
    ends = [end for end in (low, high) if end is not None and end != value]
    text = words.number(value)
    return f"{value:.9g}" if any(float(text) == end for end in ends) else text
