"""overflow: a result is beyond float32 too.

What happens   exp(89) is beyond float32's 3.4e38 (exp(710) beyond float64's 1.8e308), and so are powers and products of
               large numbers.
Why it hurts   no precision of the training cures it: the values themselves have run away.
Instead        the stable form (logsumexp, softplus, log_softmax), a clamp of the exponent, or a smaller learning rate where
               the values grew from step to step. Where it is the norm that gradients are clipped by: divide the loss.
Not this       a result that float32 holds: see fp16-overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ampguard.capture.root_calls.trees import map_tensors
from ampguard.diagnose import words
from ampguard.diagnose.causes.division_by_zero import divisor_of, divisor_position, guards
from ampguard.diagnose.causes.domain_error import outside_domain
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.fixes import stable
from ampguard.diagnose.fixes.proposals import clamp_fix, spelled
from ampguard.diagnose.locate.chain import Chain, Link
from ampguard.numerics import NEG_INF, POS_INF, dtype_name, is_finite

LARGEST_EXPONENT = {
    torch.float16: {"exp": 10.0, "expm1": 10.0, "exp2": 14.0, "sinh": 10.0, "cosh": 10.0},
    torch.float32: {"exp": 80.0, "expm1": 80.0, "exp2": 120.0, "sinh": 80.0, "cosh": 80.0},
    torch.float64: {"exp": 700.0, "expm1": 700.0, "exp2": 1000.0, "sinh": 700.0, "cosh": 700.0},
}
"""A round number below the exponent at which the result leaves the type; bfloat16 has float32's range."""

BOTH_WAYS = frozenset({"sinh", "cosh"})
"""They grow with negative exponents as well."""

LARGE = 1000.0
"""From here on a bound is a round power of ten."""

ORDINARY = 1e6
"""What a result is kept below whose largest finite value is of no use."""

TIGHTER_EXPONENTS = (80.0, 10.0)
"""Where the largest exponential is cast, multiplied or squared later on, and overflows there."""


@cause("overflow")
def overflow(evidence: Evidence) -> Finding | None:
    if evidence.given is not None or evidence.intended or evidence.op.refused:
        return None
    is_elsewhere = evidence.is_finite_in_float32
    if is_elsewhere:
        beyond = _where_float32_fails(evidence)
        if beyond is None:
            return None
        evidence = beyond
    if not evidence.float_operands or divisor_position(evidence) is not None or outside_domain(evidence) is not None:
        return None
    if any(o.values.numel() == 0 for o in evidence.operands):
        return None
    if evidence.link.kind == 1 and not _grew_on_the_way(evidence):
        return None
    wide = evidence.element(evidence.in_float64)
    counted = evidence.operands if _is_power_of_its_exponent(evidence) else evidence.float_operands
    peak = max(float(o.contributing.abs().max()) if o.contributing.numel() else 0.0 for o in counted)
    name = words.operator(evidence)
    dtype = torch.float64 if evidence.result_dtype == torch.float64 else torch.float32
    result = f"its result is {words.number(wide)} in float64"
    if wide is None or not math.isfinite(wide):
        result = f"its result is {spelled(evidence.kind)}" + (" in float64 as well" if dtype == torch.float32 else "")
    proposals = [*stable.proposals(evidence), *bounds(evidence)]
    fits = wide is not None and abs(wide) <= torch.finfo(dtype).max
    return Finding(
        "overflow",
        f"{name} {words.place(evidence)} leaves {dtype_name(dtype)}'s range ({torch.finfo(dtype).max:.2g})"
        f"{' on its way' if fits else ''}: its operands reach {words.number(peak)}, {result}.",
        weight=65 if is_elsewhere else 45,
        evidence={"max_abs_operand": peak, "result_fp64": wide if wide is None or math.isfinite(wide) else str(wide)},
        proposals=tuple(proposals),
    )


def bounds(evidence: Evidence) -> list[Proposal]:
    """What keeps the result inside its type: a smaller exponent, a larger divisor, a smaller operand."""
    if evidence.op.short_name in LARGEST_EXPONENT[torch.float32]:
        return [_bounded_exponent(evidence, _largest_exponent(evidence))]
    if _divides_by_less_than_one(evidence):
        return guards(evidence)
    peak = max((o.stats.max_abs or 0.0) for o in evidence.float_operands)
    return [_bounded_operand(evidence, peak)]


def _divides_by_less_than_one(evidence: Evidence) -> bool:
    """Whether the quotient is beyond the range because of its divisor."""
    position = divisor_of(evidence)
    return position is not None and bool((evidence.operands[position].contributing.abs() < 1).any())


def _where_float32_fails(evidence: Evidence) -> Evidence | None:
    """The same operator at an element that float32 cannot hold either; None where the step is finite in float32.

    The element that was followed is one of several that low precision could not hold. Where float32 fails at others,
    another precision is no cure.
    """
    wide, bad = evidence.in_float32, evidence.op.outputs[evidence.link.result].bad
    if evidence.precision is None or wide is None or bad is None:
        return None
    flat = bad.flat[bad.flat < wide.numel()].to(wide.device)
    beyond = flat[torch.isinf(wide.reshape(-1)[flat])]
    if not beyond.numel():
        return None
    step = evidence.step_in_float32
    if step is None or not step.is_bad:
        return None
    element = int(beyond[0])
    kind = POS_INF if float(wide.reshape(-1)[element]) > 0 else NEG_INF
    link = Link(evidence.op, evidence.link.result, element, kind)
    there = Evidence(evidence.bad, Chain([link]), evidence.outcome, evidence.replayer)
    is_made_here = all(bool(torch.isfinite(o.contributing).all()) for o in there.float_operands)
    return there if is_made_here else None


def _grew_on_the_way(evidence: Evidence) -> bool:
    """A NaN from finite operands is an overflow only where float64 survives (Inf - Inf inside the operator)."""
    wide = evidence.element(evidence.in_float64)
    return wide is not None and math.isfinite(wide)


def _largest_exponent(evidence: Evidence) -> float:
    dtype = evidence.precision if evidence.precision == torch.float16 else evidence.result_dtype
    return LARGEST_EXPONENT.get(dtype, LARGEST_EXPONENT[torch.float32])[evidence.op.short_name]


def _bounded_exponent(evidence: Evidence, bound: float) -> Proposal:
    """The operand clamped to the bound, or to a tighter one where that is not enough."""
    tighter = next((b for b in TIGHTER_EXPONENTS if b < bound), None)
    fix = clamp_fix(evidence, 0, -bound if evidence.op.short_name in BOTH_WAYS else None, bound)
    return fix if tighter is None else replace(fix, otherwise=_bounded_exponent(evidence, tighter))


def _bounded_operand(evidence: Evidence, peak: float, is_tight: bool = False) -> Proposal:
    """The largest power of ten to which the operand can be clamped so that the result keeps well inside its type.

    Of a small one (a function that grows exponentially) the largest multiple: the less a bound changes, the better. A
    tight one, where such a result leaves no loss to go on with, keeps it among ordinary numbers.
    """
    limit = ORDINARY if is_tight else math.sqrt(torch.finfo(evidence.result_dtype).max) * 1e10
    floats = [i for i, o in enumerate(evidence.operands) if o.values.is_floating_point()]
    position = max(floats, key=lambda i: evidence.operands[i].stats.max_abs or 0.0)
    if _is_power_of_its_exponent(evidence) and not _fits_with(evidence, position, 1.0, limit):
        position, peak = 1, evidence.operands[1].stats.max_abs or 0.0
    bound = 10.0 ** math.floor(math.log10(max(peak, 10.0)))
    while bound > 1.0 and not _fits_with(evidence, position, bound, limit):
        bound /= 10
    if bound < LARGE:
        multiples = (n * bound for n in range(9, 1, -1) if n * bound < peak)
        bound = next((m for m in multiples if _fits_with(evidence, position, m, limit)), bound)
    bound = float(f"{bound:.6g}")
    fix = clamp_fix(evidence, position, -bound, bound, every_use=True)
    return fix if is_tight else replace(fix, otherwise=_bounded_operand(evidence, peak, is_tight=True))


def _is_power_of_its_exponent(evidence: Evidence) -> bool:
    """Whether it may be a power of integers that is too large (`0.9 ** -n`), whatever the base is bounded to."""
    is_power = evidence.op.short_name == "pow" and len(evidence.operands) == 2
    return is_power and not evidence.operands[1].values.is_floating_point()


def _fits_with(evidence: Evidence, position: int, bound: float, limit: float) -> bool:
    call = evidence.call
    if call is None:
        return True
    target = call.tensors[position]
    args = tuple(a.clamp(-bound, bound) if a is target else a for a in map_tensors(call.args, _copy_of(target)))
    wide = tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    try:
        results = [call.func(*each, **call.kwargs) for each in (wide, args)]
    except RuntimeError:
        return True
    exact, own = (r[0] if isinstance(r, (tuple, list)) else r for r in results)
    kept = (
        a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()
    )  # (running statistics are written to)
    return bool((exact.abs() < limit).all()) and bool(own.isfinite().all()) and all(map(is_finite, kept))


def _copy_of(target: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A copy of each operand, which the operator may write to; the target itself."""
    return lambda tensor: tensor if tensor is target else tensor.clone()
