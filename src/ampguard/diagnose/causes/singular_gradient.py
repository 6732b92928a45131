"""singular-gradient: the loss is finite and its derivative is not.

What happens   x.pow(2).sum().sqrt() at 0 divides by 0 in its derivative, as do var().sqrt() of equal values, x**0.5 at 0,
               acos at 1 and eigenvectors of equal eigenvalues. Or a value of the forward pass is NaN or Inf and masked
               away (torch.where, clamp, min, a product with a mask): the loss never sees it, its derivative does, and
               0 * Inf is NaN.
Why it hurts   the loss looks healthy; one such sample turns every weight to NaN, or has its whole step skipped.
Instead        keep the operand away from the singular point: sqrt(x + eps), clamp(x, -1 + eps, 1 - eps),
               torch.linalg.vector_norm; and mask the operand, not the result: f(torch.where(ok, x, 1.0)).
Not this       a derivative that float32 can hold: see gradient-overflow.
"""

from __future__ import annotations

import math

from ampguard.diagnose import accused, words
from ampguard.diagnose.finding import Finding, cause
from ampguard.diagnose.gradients import GradientEvidence
from ampguard.diagnose.proposals import spelled
from ampguard.diagnose.singular import operand_fixes, operand_value


@cause("singular-gradient", phases=("backward",))
def singular_gradient(evidence: GradientEvidence) -> Finding | None:
    if evidence.is_only_the_scale or (evidence.given is not None and not evidence.intended):
        return None
    if evidence.ran_in_low_precision and evidence.is_finite_in_float32_at_unit_scale:
        return None
    return _hidden(evidence) if evidence.is_hidden else _at_a_singular_point(evidence)


def _hidden(evidence: GradientEvidence) -> Finding:
    name = words.operator(evidence)
    first = evidence.first_gradient
    value = operand_value(evidence.forward)
    given = "" if value is None else f" (its operand is {spelled(value)})"
    code = accused.statement(evidence)
    return Finding(
        "singular-gradient",
        f"{name} {words.place(evidence)} gives {spelled(evidence.kind)}{given} in `{code}`. The loss does not see it: it is "
        f"masked, clamped or filtered away, and the loss is finite. Its derivative does see it: "
        f"{first.op.short_name.lstrip('_')} in the backward pass multiplies it by 0 and passes on "
        f"{spelled(words.kind(first))}.",
        weight=55,
        evidence={"hidden": True, "hidden_op": evidence.op.name, "operand_value": value},
        proposals=operand_fixes(evidence),
        line=evidence.op.line,
        op=first.op,
    )


def _at_a_singular_point(evidence: GradientEvidence) -> Finding:
    forward = evidence.differentiated
    value = operand_value(evidence.forward)
    name = words.operator(evidence)
    given = "" if value is None else f" at {spelled(value)}"
    of = (
        f"the derivative of {forward.short_name.lstrip('_')}{given}"
        if forward is not None
        else "the backward of this line"
    )
    scale = "" if evidence.bad.loss_scale is None else ", at a loss scale of 1 as well"
    return Finding(
        "singular-gradient",
        f"The loss is finite and {of} {words.place(evidence)} is {spelled(evidence.kind)} in any precision{scale}: {name} in the "
        f"backward pass makes it from {_operands(evidence)}.",
        weight=50,
        evidence={"operand_value": value},
        proposals=operand_fixes(evidence),
    )


def _operands(evidence: GradientEvidence) -> str:
    bad = [s for s in evidence.scalars if not math.isfinite(s)]
    return f"the number {spelled(bad[0])}" if bad else "finite numbers"
