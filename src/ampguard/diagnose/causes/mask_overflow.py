"""mask-overflow: a mask constant does not fit the low precision and became -Inf.

What happens   `scores + (1 - mask) * -1e9`, `torch.where(mask, scores, -1e9)`, or two masks of float32's minimum added
               up: in float16, which ends at -65504, the constant is -Inf. `masked_fill(half, -1e9)` raises instead:
               "value cannot be converted to type at::Half without overflow".
Why it hurts   a row that is masked everywhere becomes softmax(-Inf, ..., -Inf) = NaN; -1e9 would have given a uniform row.
Instead        scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min), one mask at a time.
Not this       -Inf that the author wrote on purpose: see masked-softmax.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from ampguard.diagnose import words
from ampguard.diagnose.code import accused
from ampguard.diagnose.code.rewrite import clamped_result, with_constant
from ampguard.diagnose.code.source import line_of_code
from ampguard.diagnose.evidence import Evidence, result_of
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.fixes.mask_code import clamped_cast
from ampguard.diagnose.fixes.proposals import at_the_head, changed_result, precision_fixes
from ampguard.diagnose.givens.naming import NamedTensor, all_buffers, buffer_behind
from ampguard.diagnose.locate.rows import empty_rows, is_masks_doing
from ampguard.numerics import NEG_INF, dtype_name, fits, is_low_precision, largest
from ampguard.replay.operators import flat_scalars
from ampguard.replay.trace import asked_dtype
from ampguard.replay.variants import Variant

NAMED = 3
"""Masks that a fix names."""

SUMS = frozenset({"add", "sub"})
MINIMA = tuple(float(torch.finfo(d).min) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64))


@cause("mask-overflow")
def mask_overflow(evidence: Evidence) -> Finding | None:
    precision = evidence.precision
    if evidence.op.refused:
        return _refused(evidence)
    if evidence.intended and (made := _made_in_low_precision(evidence)) is not None:
        return made
    if evidence.given is not None and evidence.intended:
        return _cast_with_the_model(evidence)
    if precision is None or evidence.given is not None or evidence.intended:
        return None
    constant = mask_constant(evidence)
    if constant is None:
        return None
    limit = -largest(precision)
    low = float(torch.finfo(precision).min)
    name = dtype_name(precision)
    are_two_masks = _are_two_masks(evidence, low)
    return Finding(
        "mask-overflow",
        f"{_what_left(constant, low, are_two_masks)} {words.place(evidence)} leaves {name}, whose lowest value is {limit:g}, "
        f"and became -Inf. A row that is masked everywhere then has no finite entry, and its softmax is NaN.",
        weight=90,
        evidence={"constant": constant, "limit": limit},
        proposals=(
            Proposal(
                "mask-value",
                words.region(evidence),
                _in_range(evidence, constant, low),
                trial=changed_result(lambda t: t.clamp(min=low, max=-low)),
            ),
            *(() if are_two_masks else precision_fixes(evidence)),
        ),
        dtype=precision,
    )


def _in_range(evidence: Evidence, constant: float, low: float) -> str:
    """The fix in words, with the changed line where the text tells what is to be changed."""
    precision = evidence.precision
    assert precision is not None
    is_sum = evidence.op.short_name in SUMS  # the type's own minimum plus a score may leave the range again
    is_positive = evidence.kind == "+inf"  # to be subtracted further on
    lowest = f"torch.finfo({precision}).{'max' if is_positive else 'min'}"
    bound = f"{'max' if is_positive else 'min'}={lowest}"
    line = line_of_code(evidence.op.line) if evidence.op.line is not None and not is_sum else None
    written = with_constant(line, -constant if is_positive else constant, lowest) if line is not None else None
    if written is not None:
        return f"use {lowest} ({-low if is_positive else low:g}) as the mask constant, once: {written}"
    in_words = (
        f"keep the mask within {dtype_name(precision)}, whose lowest value is {low:g}"
        if constant < low
        else f"combine the masks before they become numbers, or keep the sum within {dtype_name(precision)}"
    )
    written = accused.with_changed_result(evidence, clamped_result(bound)) or clamped_cast(evidence, bound)
    return (
        f"{in_words}: {written}" if written is not None else f"{in_words}, with .clamp({bound}): {words.code(evidence)}"
    )


def _what_left(constant: float, low: float, are_two_masks: bool) -> str:
    """The constant itself, or the sum of one that fits with what was there already."""
    if constant < low:
        return f"The mask constant {constant:g}"
    already = "what was masked already" if are_two_masks else "what it was added to"
    return f"The sum of a mask constant ({constant:g}) and {already}"


def _are_two_masks(evidence: Evidence, low: float) -> bool:
    """Whether both operands are the type's own lowest number: in any other type the two would be that type's."""
    values = [o.value for o in evidence.float_operands]
    return len(values) == 2 and all(v is not None and math.isclose(v, low, rel_tol=1e-3) for v in values)


def mask_constant(evidence: Evidence) -> float | None:
    """The constant that a mask put in place of (or added to) a value, if that is what left the precision.

    Decided by the numbers: the result is -Inf; one operand, the same wherever the result is bad, is a large negative
    constant (a literal, a dtype's minimum, a round power of ten) that with the other operand leaves the range.
    """
    precision = evidence.precision
    if precision is None or evidence.kind == "nan" or (evidence.kind == "+inf" and not _is_subtracted(evidence)):
        return None
    limit = largest(precision)
    sign = -1.0 if evidence.kind == "+inf" or evidence.op.short_name == "sub" else 1.0
    for scalar in (sign * s for s in evidence.scalars):
        if math.isfinite(scalar) and scalar <= -0.9 * limit:
            others = [c for o in evidence.float_operands if (c := _constant_where_bad(evidence, o.values)) is not None]
            scales_a_mask = evidence.op.short_name != "mul" or any(c == 1.0 for c in others)
            return scalar if scales_a_mask else None
    for operand in evidence.float_operands:
        value = _constant_where_bad(evidence, operand.values)
        value = -value if value is not None and evidence.kind == "+inf" else value
        if value is not None and value <= -0.45 * limit and looks_like_a_constant(value):
            return value
    return None


def _cast_with_the_model(evidence: Evidence) -> Finding | None:
    """A mask that is a buffer: finite in float32, -Inf since the model was cast (`model.half()`)."""
    mask = buffer_behind(evidence) if evidence.converts and is_masks_doing(evidence) else None
    constant = _before_the_cast(evidence, mask) if mask is not None else None
    if mask is None or constant is None:
        return None
    name, limit = dtype_name(mask.tensor.dtype), -largest(mask.tensor.dtype)
    count, total, _ = empty_rows(evidence) or (0, 0, 0)
    rows = f" {count} of {total} rows of {words.operator(evidence)} have no finite entry now." if count else ""
    masks = [b for b in all_buffers(evidence) if _before_the_cast(evidence, b) is not None]
    listed = ", ".join(_spelled(m.name) for m in masks[:NAMED]) + (", ..." if len(masks) > NAMED else "")
    low = torch.finfo(mask.tensor.dtype).min
    finite = {m.key: m.tensor.detach().clamp(min=low) for m in masks}
    return Finding(
        "mask-overflow",
        f"The buffer `{mask.name}` is a mask of {constant:g}, which leaves {name}, whose lowest value is {limit:g}: cast with "
        f"the model (`.half()`, `.to({name})`), it became -Inf.{rows} A row that is masked everywhere is uniform with "
        f"{constant:g}, and NaN with -Inf.",
        weight=92,
        evidence={"constant": constant, "limit": limit, "names": [m.name for m in masks]},
        proposals=(
            Proposal(
                "mask-value",
                mask.name,
                f"let the mask hold a number that {name} has: register it with {limit:g}, or behind the cast: "
                f"for mask in ({listed}{',' if len(masks) == 1 else ''}): mask.clamp_(min={limit:g})",
                trial=lambda e: Variant(tensors=finite),
            ),
        ),
        dtype=mask.tensor.dtype,
    )


def _made_in_low_precision(evidence: Evidence) -> Finding | None:
    """`torch.tensor(-1e9, dtype=scores.dtype)` is -Inf as it is made: the same line makes a number in the float32 step."""
    at = Evidence(evidence.bad, evidence.chain, evidence.outcome, evidence.replayer)
    at.link = evidence.chain.links[-1]
    made = at.op.outputs[at.link.result].dtype
    if not is_low_precision(made) or not is_masks_doing(evidence):
        return None
    call = at.call_in_float32_step if evidence.is_finite_in_float32_step else None
    result = result_of(call.output, at.link.result) if call is not None else None
    value = at.element(result) if isinstance(result, Tensor) else None
    limit, low = -largest(made), torch.finfo(made).min
    if value is None or not -math.inf < value < limit or not looks_like_a_constant(value):
        return None
    name = dtype_name(made)
    count, total, _ = empty_rows(evidence) or (0, 0, 0)
    rows = f": {count} of {total} rows of {words.operator(evidence)} have no finite entry" if count else ""
    return Finding(
        "mask-overflow",
        f"The mask constant {value:g} {words.place(at)} is made as a {name}, whose lowest value is {limit:g}, and became "
        f"-Inf{rows}. In float32 it is a number, and the step is finite.",
        weight=91,
        evidence={"constant": value, "limit": limit, "empty_rows": count, "rows": total},
        proposals=(
            Proposal(
                "mask-value",
                words.region(at),
                _in_range(at, value, low),
                trial=lambda _: changed_result(lambda t: t.clamp(min=low))(at),
            ),
            *precision_fixes(evidence),
        ),
        op=at.op,
        dtype=made,
    )


def _before_the_cast(evidence: Evidence, buffer: NamedTensor) -> float | None:
    """The lowest value of a low-precision buffer from before it was cast, if it left the precision by that."""
    if evidence.replayer is None or not is_low_precision(buffer.tensor.dtype):
        return None
    lowest = evidence.replayer.lowest_before(buffer.name, buffer.tensor)
    return lowest if lowest is not None and -math.inf < lowest < -largest(buffer.tensor.dtype) else None


def _spelled(name: str) -> str:
    """
    >>> _spelled("layers.0.attn.bias")
    'layers[0].attn.bias'
    """
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", name)


def _is_subtracted(evidence: Evidence) -> bool:
    """Whether a positive constant is on its way to be subtracted (`scores - (1 - mask) * 1e9`) or negated."""
    links = evidence.chain.links
    here = next((i for i, link in enumerate(links) if link is evidence.link), 0)
    return any(link.op.short_name in ("sub", "rsub", "neg") and link.kind == NEG_INF for link in links[:here])


def looks_like_a_constant(value: float) -> bool:
    """A dtype's minimum (or half of it), or a number with at most two significant digits and at least four zeros."""
    if any(math.isclose(value, m * share, rel_tol=1e-3) for m in MINIMA for share in (1.0, 0.5)):
        return True
    mantissa = f"{abs(value):.4e}".split("e")[0]
    return float(mantissa) == round(float(mantissa), 1)


def _constant_where_bad(evidence: Evidence, values: Tensor) -> float | None:
    """The one value that an operand has wherever the result is -Inf; None where it has several."""
    bad = evidence.op.outputs[evidence.link.result].bad
    shape = evidence.op.outputs[evidence.link.result].shape
    if bad is None:
        return None
    try:
        spread = values.expand(shape).reshape(-1)
    except RuntimeError:
        return None
    picked = spread[bad.flat[bad.kinds == evidence.link.kind].to(spread.device)].double()
    if picked.numel() == 0:
        return None
    first = float(picked[0])
    return first if bool((picked == picked[0]).all()) else None


def _rewritten(evidence: Evidence, constant: float, precision: torch.dtype) -> str:
    """The line with the type's own minimum in place of the constant."""
    line = line_of_code(evidence.op.line) if evidence.op.line is not None else None
    fitting = f"torch.finfo({precision}).{'min' if constant < 0 else 'max'}"
    return (with_constant(line, constant, fitting) if line is not None else None) or words.code(evidence)


def _refused(evidence: Evidence) -> Finding | None:
    """PyTorch would not convert the constant."""
    error = evidence.bad.error or evidence.outcome.error
    constant = next((s for s in evidence.scalars if not fits(s, torch.float16)), None)
    given = [*(o.dtype for o in evidence.op.inputs), asked_dtype(evidence.op)]
    precision = next((dtype for dtype in given if dtype in (torch.float16, torch.bfloat16)), None)
    if constant is None or precision is None:
        return None
    limit = -largest(precision)

    def with_fitting_constant(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        low, high = torch.finfo(precision).min, torch.finfo(precision).max

        def fit(value: Any) -> Any:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return min(max(value, low), high) if is_number and value in flat_scalars(args, kwargs) else value

        return func(*(fit(a) for a in args), **{k: fit(v) for k, v in kwargs.items()})

    return Finding(
        "mask-overflow",
        f"PyTorch refused {words.operator(evidence)}: the mask constant {constant:g} does not fit {dtype_name(precision)}, "
        f"whose lowest value is {limit:g} ({error}).",
        weight=95,
        evidence={"constant": constant, "limit": limit, "message": str(error)},
        proposals=(
            Proposal(
                "mask-value",
                words.region(evidence),
                f"use {dtype_name(precision)}'s own minimum ({limit:g}) as the mask constant: "
                + _rewritten(evidence, constant, precision),
                trial=at_the_head(with_fitting_constant),
            ),
            *precision_fixes(evidence),
        ),
        dtype=precision,
    )
