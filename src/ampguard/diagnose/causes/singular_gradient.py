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
from dataclasses import replace

import torch
from torch import Tensor

from ampguard.diagnose import words
from ampguard.diagnose.code import accused
from ampguard.diagnose.finding import Finding, cause
from ampguard.diagnose.fixes.proposals import spelled
from ampguard.diagnose.fixes.singular import DECOMPOSITIONS, operand_fixes, operand_value
from ampguard.diagnose.gradients import GradientEvidence
from ampguard.diagnose.locate.chain import Link
from ampguard.diagnose.locate.rows import empty_rows
from ampguard.replay.operators import flat_tensors

LARGEST = 512
"""Rows of a matrix up to which all of its values are compared."""


@cause("singular-gradient", phases=("backward",))
def singular_gradient(evidence: GradientEvidence) -> Finding | None:
    if evidence.is_only_the_scale or (evidence.given is not None and not evidence.intended):
        return None
    if (
        evidence.ran_in_low_precision
        and evidence.is_finite_in_float32_at_unit_scale
        and not is_of_equal_values(evidence)
    ):
        return None
    return _hidden(evidence) if evidence.is_hidden else _at_a_singular_point(evidence)


def is_of_equal_values(evidence: GradientEvidence) -> bool:
    """Whether a decomposition, which runs in float32 or more always, is differentiated where two of its values are equal: other
    roundings part them, those of a wider network among them, and do not make the derivative any better."""
    forward = evidence.differentiated
    if forward is None or evidence.is_hidden or forward.short_name not in DECOMPOSITIONS - {"linalg_qr"}:
        return False
    operands = evidence.forward.operands
    return bool(operands) and _has_equal_values(operands[0].values, forward.short_name)


def _has_equal_values(matrices: Tensor, name: str) -> bool:
    """Whether two of the eigenvalues or singular values of a matrix are the same number. Waits for the device."""
    if matrices.dim() < 2 or min(matrices.shape[-2:]) > LARGEST:
        return False
    with torch.no_grad():
        if "svd" in name:
            values = torch.linalg.svd(matrices, full_matrices=False)[1]
        else:
            values = (torch.linalg.eigh if "eigh" in name else torch.linalg.eig)(matrices)[0]
        alike = values.unsqueeze(-1) == values.unsqueeze(-2)
        return bool(alike.triu(1).any())


def _hidden(evidence: GradientEvidence) -> Finding:
    name = words.operator(evidence)
    first = evidence.first_gradient
    value = operand_value(evidence.forward)
    given = _empty_rows(evidence) if value is None else f" (its operand is {spelled(value)})"
    code = accused.statement(evidence)
    how = "multiplies it by 0 and passes on" if _multiplies_by_zero(first) else "reads it and passes on"
    return Finding(
        "singular-gradient",
        f"{name} {words.place(evidence)} gives {spelled(evidence.kind)}{given}, which the loss does not see and its derivative "
        f"does: {words.name(first.op)} in the backward pass {how} {spelled(words.kind(first))}. It is masked, clamped, "
        f"compared or filtered away in the forward pass, behind `{code}`.",
        weight=55,
        evidence={"hidden": True, "hidden_op": evidence.op.name, "operand_value": value},
        proposals=operand_fixes(evidence),
        line=evidence.op.line,
        op=first.op,
    )


def _empty_rows(evidence: GradientEvidence) -> str:
    rows = empty_rows(evidence)
    return f" ({rows[0]} of its {rows[1]} rows are -Inf throughout, the mask leaves them no key)" if rows else ""


def _multiplies_by_zero(link: Link) -> bool:
    """Whether the other factor of a product is 0 at the bad element."""
    op = link.op
    if op.short_name != "mul" or op.args is None or link.flat is None:
        return False
    factors = [
        t for t, read in zip(flat_tensors(op.args, op.kwargs or {}), op.inputs, strict=False) if read.bad is None
    ]
    shape = op.outputs[link.result].shape
    return any(bool(t.broadcast_to(shape).reshape(-1)[link.flat] == 0) for t in factors)


def _at_a_singular_point(evidence: GradientEvidence) -> Finding:
    forward = evidence.differentiated
    value = operand_value(evidence.forward)
    name = words.operator(evidence)
    given = "" if value is None else f" at {spelled(value)}"
    proposals = operand_fixes(evidence) if forward is not None or not evidence.is_of_script else ()
    if (
        evidence.is_of_script
    ):  # the change of one operator has no derivative that could be tried in place of the graph's
        proposals = tuple(replace(proposal, trial=None, otherwise=None) for proposal in proposals)
    if forward is not None:
        of = f"the derivative of {words.name(forward)}{given}"
    elif evidence.is_of_script:
        of = "a derivative that TorchScript computes as a whole"
    else:
        of = "what this line of a hand-written backward computes"
    scale = "" if evidence.at_unit_scale is None else ", at a loss scale of 1 as well"
    is_used = not evidence.bad.is_of_gradients
    what = (
        f"The step computes with a derivative that is not finite: {of}" if is_used else f"The loss is finite and {of}"
    )
    then = "; " if is_used else ": "
    by_rounding = evidence.ran_in_low_precision and evidence.is_finite_in_float32_at_unit_scale
    always = ", because two of its values are equal" if by_rounding else " in any precision"
    where = "in forward mode" if evidence.op.is_tangent else "in the backward pass"
    return Finding(
        "singular-gradient",
        f"{what} {words.place(evidence)} is {spelled(evidence.kind)}{always}{scale}{then}{name} {where} "
        f"makes it from {_operands(evidence)}.",
        weight=50,
        evidence={"operand_value": value},
        proposals=proposals,
    )


def _operands(evidence: GradientEvidence) -> str:
    bad = [s for s in evidence.scalars if not math.isfinite(s)]
    values = [v for o in evidence.float_operands if (v := o.value) is not None and math.isinf(v)] if not bad else []
    if values:
        return " and ".join(spelled(value) for value in values)
    return f"the number {spelled(bad[0])}" if bad else "finite numbers"
