"""fp16-overflow: a result is beyond the low precision's largest number.

What happens   float16 ends at 65504. A product or a sum that goes beyond it becomes Inf, silently; a softmax, a norm or
               a difference of such values is NaN, and from there everything.
Why it hurts   weights and activations grow as training goes on, so it comes late and returns more and more often: a
               smaller learning rate or clipping delays it. In evaluation it comes with longer inputs.
Instead        compute this module in float32 (leave autocast: a bare `.float()` is undone by the next matrix product),
               train in bfloat16, or scale before multiplying: `(q * scale) @ k.transpose(-2, -1)`.
               A kernel of another library (Triton, CUDA, NumPy) that computes in float32 has to store in float32, too.
               The norm that float16 gradients are clipped by overflows as well, and clipping makes them all 0: float32
               gradients.
Not this       a result that float32 cannot hold either: see overflow. A mask constant: see mask-overflow.
"""

from __future__ import annotations

from ampguard.diagnose import words
from ampguard.diagnose.causes.mask_overflow import mask_constant
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, cause
from ampguard.diagnose.fixes import stable
from ampguard.diagnose.fixes.proposals import precision_fixes, spelled
from ampguard.diagnose.fixes.script_casts import casts
from ampguard.diagnose.locate import lineage
from ampguard.diagnose.locate.slicing import chain_from
from ampguard.numerics import largest
from ampguard.replay.trace import bad_elements, traced

SHORT_STEP = 8000
"""Operators of a step that is followed in float32 as well: some half a second."""


@cause("fp16-overflow", phases=("forward", "opaque"))
def fp16_overflow(evidence: Evidence) -> Finding | None:
    precision = evidence.precision
    if precision is None or evidence.given is not None or evidence.intended or evidence.op.refused:
        return None
    if not evidence.is_finite_in_float32 or mask_constant(evidence) is not None:
        return None
    limit = largest(precision)
    peak = evidence.largest_in_float32
    name = words.operator(evidence)
    if peak is not None and peak > limit:
        what = f"{name} gives {words.number(peak)} in float32; {words.precision(evidence)} ends at {limit:g}"
    elif evidence.called is not None:
        return None  # whether it over- or underflows on its way, nobody sees
    else:
        what = (
            f"{name} is finite in float32 ({words.number(evidence.element(evidence.in_float32))}) and "
            f"{evidence.kind} in {words.precision(evidence)}: a number on the way to its result is beyond {limit:g}"
        )
    facts: dict[str, object] = {"max_abs_fp32": peak, "limit": limit}
    explanation = f"The result of {name} {words.place(evidence)} does not fit {words.precision(evidence)}: {what}."
    if lineage.undone_float(evidence.trace, evidence.op) and not (evidence.op.line and casts(evidence.op.line)):
        facts["float_undone_by_autocast"] = True
        explanation += (
            " Its operands were made float32 by .float(), and autocast cast them back for this operator:"
            " only leaving autocast keeps float32."
        )
    if evidence.bad.mode == "eval":
        explanation += " It happened in evaluation, where inputs can be longer or larger than in training."
    explanation += _in_float32_as_well(evidence)
    proposals = (*stable.proposals(evidence), *precision_fixes(evidence))
    return Finding("fp16-overflow", explanation, weight=60, evidence=facts, proposals=proposals)


def _in_float32_as_well(evidence: Evidence) -> str:
    """Where the same step fails when it is computed in float32; "" where it does not."""
    if len(evidence.trace.ops) > SHORT_STEP:
        return ""  # the time is better spent on trying fixes, one of which is float32
    outcome = evidence.step_in_float32
    if outcome is None or not outcome.is_bad:
        return ""
    for _, target in outcome.targets:
        elements = bad_elements(target)
        chain = chain_from(outcome.trace, traced(target), elements) if elements is not None else None
        if chain is not None and chain.given is None:
            there = Evidence(evidence.bad, chain, outcome, evidence.replayer)
            name, place = words.operator(there), words.place(there)
            return f" Float32 alone is no cure: there {name} {place} gives {spelled(there.kind)}."
    return ""
