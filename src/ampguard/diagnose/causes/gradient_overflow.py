"""gradient-overflow: gradients overflow the low precision even without a loss scale.

What happens   the derivative of normalize() at a vector of length 1e-12 is 1e12, that of binary_cross_entropy at a
               probability of 1e-7 is 1e7: float32 holds them, float16 ends at 65504 and makes them Inf.
Why it hurts   no loss scale helps: the scaler skips this step, and every step like it, and its scale falls and falls.
Instead        float32 for this part of the model, bfloat16, or a larger epsilon where the derivative divides by little.
Not this       gradients that are finite at a loss scale of 1: see loss-scale-overflow. A derivative that is not finite in
               float32 either: see singular-gradient.
"""

from __future__ import annotations

import math

import torch

from ampguard.diagnose import words
from ampguard.diagnose.causes.overflow import bounds
from ampguard.diagnose.causes.singular_gradient import is_of_equal_values
from ampguard.diagnose.finding import Finding, cause, find_cause
from ampguard.diagnose.fixes.proposals import precision_fixes, spelled
from ampguard.diagnose.fixes.singular import operand_fixes
from ampguard.diagnose.gradients import GradientEvidence
from ampguard.numerics import largest


@cause("gradient-overflow", phases=("backward",))
def gradient_overflow(evidence: GradientEvidence) -> Finding | None:
    if evidence.is_only_the_scale or evidence.given is not None or evidence.intended:
        return None
    if not evidence.ran_in_low_precision:
        return _beyond_float32(evidence)
    if not evidence.is_finite_in_float32_at_unit_scale:
        return None
    if evidence.is_hidden:
        return _hidden_in_forward(evidence)
    precision = evidence.low_precision_in_use
    assert precision is not None
    if is_of_equal_values(evidence):
        return None
    if not evidence.is_finite_in_float32 and evidence.element(evidence.in_float32) is not None:
        return _flushed(evidence, precision)
    limit = largest(precision)
    name = words.operator(evidence)
    wide = evidence.element(evidence.in_float32)
    peak = evidence.largest_in_float32
    if evidence.called is not None and not (peak is not None and peak > limit):
        return None  # whether it over- or underflows on its way, nobody sees
    found = f"{words.number(peak)} in float32" if peak is not None else f"{words.number(wide)} in float32"
    scale = "" if evidence.at_unit_scale is None else ", even at a loss scale of 1"
    what = "all gradients of this step are finite" if evidence.bad.is_of_gradients else "this step is finite"
    return Finding(
        "gradient-overflow",
        f"In the backward pass {name} {words.place(evidence)} gives {spelled(evidence.kind)}{scale}: the gradient is {found}, "
        f"and {words.precision(evidence)} ends at {limit:g}. In float32 {what}.",
        weight=60,
        evidence={"max_abs_fp32": peak, "limit": limit},
        proposals=(*precision_fixes(evidence), *operand_fixes(evidence)),
        dtype=precision,
    )


def _flushed(evidence: GradientEvidence, precision: torch.dtype) -> Finding:
    """Float32 arithmetic on the same operands is no better: one of them is 0 in low precision, and is not in float32."""
    name = words.operator(evidence)
    what = "all gradients of this step are finite" if evidence.bad.is_of_gradients else "this step is finite"
    return Finding(
        "fp16-underflow",
        f"In the backward pass {name} {words.place(evidence)} gives {spelled(evidence.kind)}: an operand of it is 0 in "
        f"{words.precision(evidence)}, where it was flushed to zero, and is not in float32. In float32 {what}.",
        weight=60,
        evidence={"operands_are_flushed": True},
        proposals=(*operand_fixes(evidence), *precision_fixes(evidence)),
        dtype=precision,
    )


def _hidden_in_forward(evidence: GradientEvidence) -> Finding | None:
    """A value of the forward pass that low precision made bad, and that the loss does not see: the forward cause."""
    found = find_cause(evidence, phase="forward")
    if found is None:
        return None
    text = (
        f"{found.explanation} The loss does not see this value (it is masked, clamped or filtered away) and is finite; its "
        f"derivative does see it, and the gradients are not."
    )
    return Finding(
        found.cause,
        text,
        weight=60,
        evidence={**found.evidence, "hidden": True},
        proposals=found.proposals,
        line=evidence.op.line,
        dtype=found.dtype,
        op=evidence.first_gradient.op,
    )


def _beyond_float32(evidence: GradientEvidence) -> Finding | None:
    """In float32: finite factors whose product only float64 can hold.

    What a hand-written backward computes on its way is a result like those of the forward pass: `overflow`.
    """
    wide = evidence.element(evidence.in_float64)
    if evidence.is_hidden or wide is None or not math.isfinite(wide) or evidence.kind == "nan":
        return None
    is_by_hand = evidence.differentiated is None and not evidence.is_of_script
    return Finding(
        "overflow" if is_by_hand else "gradient-overflow",
        f"In the backward pass {words.operator(evidence)} {words.place(evidence)} gives {words.number(wide)}, beyond "
        f"float32's largest number.",
        weight=60,
        evidence={"value_fp64": wide},
        proposals=tuple(bounds(evidence)) if evidence.differentiated is None else operand_fixes(evidence),
    )
