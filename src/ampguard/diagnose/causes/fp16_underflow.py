"""fp16-underflow: an operand or an epsilon was flushed to zero in low precision, and what divides by it is not finite.

What happens   float16 has nothing between 0 and 6e-8. `x / (norm + 1e-8)` adds exactly 0; a small probability is 0 and
               its log is -Inf; a small variance is 0 and its rsqrt is Inf. So is the distance to 1: tanh and sigmoid
               of 5 are 1, of which atanh and logit are Inf. In float32 the same step is finite.
Why it hurts   the epsilon that guards the division is there in the code and gone in the numbers.
Instead        an epsilon that float16 can hold (1e-4 to 1e-3), the stable form (log_softmax instead of log of softmax),
               or float32 for these lines.
Not this       a divisor that is 0 in float32 too: see division-by-zero and domain-error.
"""

from __future__ import annotations

import math

import torch

from ampguard import numerics
from ampguard.diagnose import words
from ampguard.diagnose.causes.division_by_zero import divisor_of
from ampguard.diagnose.causes.domain_error import inside_of, outside_domain
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.fixes import stable
from ampguard.diagnose.fixes.eps_argument import larger_eps
from ampguard.diagnose.fixes.proposals import (
    clamp_fix,
    epsilon_fix,
    or_larger,
    precision_fixes,
    smallest_epsilon,
    spelled,
)
from ampguard.diagnose.locate import lineage
from ampguard.diagnose.locate.contributions import contributing

GUARDS = frozenset({"add", "sub", "rsub", "clamp", "clamp_min", "maximum"})
"""Operators that keep a divisor from being 0 by a constant."""


@cause("fp16-underflow")
def fp16_underflow(evidence: Evidence) -> Finding | None:
    if evidence.given is not None or evidence.intended or evidence.op.refused or evidence.is_finite_in_float32:
        return None
    if not evidence.ran_in_low_precision:
        return None
    if evidence.replayer is None:  # traced as it ran: there is no step to compute in float32
        flushed = _vanished_constant(evidence)
    else:
        flushed = _flushed_operand(evidence) if evidence.is_finite_in_float32_step else None
    if flushed is None:
        return _at_the_edge(evidence)
    position, value = flushed
    name = words.operator(evidence)
    proposals = list(stable.proposals(evidence))
    if evidence.op.short_name in ("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "pow"):
        proposals.append(clamp_fix(evidence, position, smallest_epsilon(evidence), None))
    else:

        def with_epsilon(epsilon: float) -> Proposal:
            return larger_eps(evidence, epsilon) or epsilon_fix(evidence, position, epsilon)

        proposals.append(or_larger(with_epsilon(smallest_epsilon(evidence)), with_epsilon, evidence))
    return Finding(
        "fp16-underflow",
        f"An operand of {name} {words.place(evidence)} is 0 in low precision and {words.number(value)} in float32: it was "
        f"flushed to zero, and {name} of 0 is {spelled(evidence.kind)}.",
        weight=70,
        evidence={"operand_fp32": value, "operand": position, "smallest_float16": 2**-24},
        proposals=(*proposals, *precision_fixes(evidence)),
        dtype=evidence.low_precision_in_use,
    )


def _at_the_edge(evidence: Evidence) -> Finding | None:
    """An operand that stands at the end of a function's domain, and in the float32 step within it: atanh(1 - 1e-6), acos."""
    found = outside_domain(evidence)
    if (
        evidence.replayer is None
        or found is None
        or found[1] not in found[2:]
        or not evidence.is_finite_in_float32_step
    ):
        return None
    position, value, low, high = found
    call = evidence.call_in_float32_step
    if call is None or evidence.flat is None or position >= len(call.tensors):
        return None
    theirs = call.tensors[position]
    if theirs.shape != evidence.operands[position].values.shape or theirs.shape != evidence.op.outputs[0].shape:
        return None
    wide = float(theirs.reshape(-1)[evidence.flat])
    if not (-math.inf if low is None else low) < wide < (math.inf if high is None else high):
        return None
    name = words.operator(evidence)
    clamp = clamp_fix(evidence, position, *inside_of(low, high, evidence.precision))
    return Finding(
        "fp16-underflow",
        f"An operand of {name} {words.place(evidence)} is {value:g} in low precision and {wide:.9g} in float32: its distance "
        f"from {value:g} was rounded away, and {name} of {value:g} is {spelled(evidence.kind)}.",
        weight=70,
        evidence={"operand_fp32": wide, "operand": position, "end_of_domain": value},
        proposals=(*stable.proposals(evidence), clamp, *precision_fixes(evidence)),
        dtype=evidence.low_precision_in_use,
    )


def _flushed_operand(evidence: Evidence) -> tuple[int, float] | None:
    """An operand that is 0 at the bad element and is not 0 in the float32 step: (which, its float32 value)."""
    call = evidence.call_in_float32_step
    if call is None:
        return None
    pairs = list(enumerate(zip(evidence.operands, call.tensors, strict=False)))
    divisor = divisor_of(evidence)
    for position, (mine, theirs) in sorted(pairs, key=lambda pair: pair[0] != divisor):
        if not mine.values.is_floating_point() or mine.values.shape != theirs.shape:
            continue
        test = contributing(evidence.op, position, evidence.link.result, evidence.flat)
        if test is None:
            if theirs.numel() != 1:
                continue
            index = torch.zeros(1, dtype=torch.long)
        else:
            index = test(torch.arange(theirs.numel())).nonzero().reshape(-1)
        here = mine.values.reshape(-1)[index]
        there = theirs.reshape(-1)[index].double()
        flushed = (here == 0) & (there != 0) & torch.isfinite(there)
        if flushed.any():
            return position, float(there[flushed].abs().max())
    return None


def _vanished_constant(evidence: Evidence) -> tuple[int, float] | None:
    """A divisor that is 0 at the bad element although a constant was added to it, or it was clamped at one, which the low
    precision rounds to 0: (which operand, the constant).

    No sum of that precision's numbers and the constant is 0 in float32, the spacing of the former being larger.
    """
    name, position = evidence.op.short_name, divisor_of(evidence)
    if position is None:
        position = 0 if name in ("log", "log2", "log10") else None
    if position is None or position >= len(evidence.operands):
        return None
    made_by = lineage.maker(evidence.trace, evidence.op, position)
    if (
        made_by is None
        or made_by.short_name not in GUARDS
        or not bool((evidence.operands[position].contributing == 0).any())
    ):
        return None
    dtype = made_by.outputs[0].dtype
    if not numerics.is_low_precision(dtype):
        return None
    gone = [abs(number) for number in made_by.scalars if number and float(torch.tensor(number, dtype=dtype)) == 0]
    return (position, max(gone)) if gone else None
