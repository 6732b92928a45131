"""quantizer-scale: the scale of a float8 format is zero, infinite, or made for smaller values.

What happens   a tensor is multiplied by a scale and stored in float8, which ends at 448 (e4m3fn) or 57344 (e5m2). The
               scale is the format's largest number over the largest |x|: infinite where all x are 0, and too large where
               it was made of earlier, smaller values (delayed scaling).
Why it hurts   Inf * 0 is NaN; what the cast cannot hold is Inf or NaN (some kernels saturate instead). Both reach the
               matrix product, and the loss.
Instead        keep the largest |x| away from 0: `amax.clamp(min=1e-12)`; clamp to the format's range before the cast:
               `(x * scale).clamp(-limit, limit).to(dtype)`; and make the scale of the present values.
Not this       a float16 result beyond 65504: see fp16-overflow.
"""

from __future__ import annotations

import math

import torch

from ampguard.diagnose import words
from ampguard.diagnose.causes.division_by_zero import divisor_position, guards
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, cause
from ampguard.diagnose.fixes.proposals import clamp_fix, precision_fixes
from ampguard.diagnose.locate.chain import Link
from ampguard.numerics import dtype_name, largest

NEAR = 4
"""Operators behind the scale within which what was multiplied by it is stored."""


@cause("quantizer-scale")
def quantizer_scale(evidence: Evidence) -> Finding | None:
    if evidence.given is not None or evidence.intended or evidence.op.refused:
        return None
    stored = next((link for link in reversed(evidence.chain.links[-NEAR:]) if _is_float8(_dtype_of(link))), None)
    if stored is None:
        return None
    return _saturated(evidence) if stored is evidence.chain.head else _infinite(evidence, _dtype_of(stored))


def _saturated(evidence: Evidence) -> Finding | None:
    """The cast itself cannot hold what it is given."""
    dtype, limit = evidence.result_dtype, largest(evidence.result_dtype)
    peak = max((o.stats.max_abs or 0.0 for o in evidence.float_operands), default=0.0)
    if not evidence.is_finite_in_float32 or not limit < peak < math.inf:
        return None
    name = words.operator(evidence)
    return Finding(
        "quantizer-scale",
        f"{name} {words.place(evidence)} stores values up to {words.number(peak)} in {dtype_name(dtype)}, which ends at "
        f"{limit:g}: the scale by which they were multiplied is {words.number(peak / limit)} times too large for them. It was "
        f"made for smaller values (of earlier steps, or of another part of the tensor).",
        weight=80,
        evidence={"format": dtype_name(dtype), "limit": limit, "max_abs": peak, "state": "saturated"},
        proposals=(clamp_fix(evidence, 0, -limit, limit), *precision_fixes(evidence)),
    )


def _infinite(evidence: Evidence, dtype: torch.dtype) -> Finding | None:
    """The scale is no number, or infinite: what it was divided by was 0, or next to it."""
    position = divisor_position(evidence)
    if position is None or not evidence.float_operands:
        return None
    divisor = evidence.operands[position]
    zeros, parts = int((divisor.values == 0).sum()), divisor.values.numel()
    some = f", in {zeros} of {parts} parts" if parts > 1 else ""
    what = (
        f"divides by 0: all values that it is made of are 0{some}"
        if zeros
        else f"divides by {words.number(divisor.value)}, and leaves {dtype_name(evidence.result_dtype)}'s range"
    )
    return Finding(
        "quantizer-scale",
        f"The scale of a tensor that is stored in {dtype_name(dtype)} is infinite: {words.operator(evidence)} "
        f"{words.place(evidence)} {what}. The tensor times this scale is not finite.",
        weight=80,
        evidence={"format": dtype_name(dtype), "divisor": divisor.stats.as_dict(), "state": "infinite"},
        proposals=tuple(guards(evidence)),
    )


def _dtype_of(link: Link) -> torch.dtype:
    return link.op.outputs[link.result].dtype


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1
