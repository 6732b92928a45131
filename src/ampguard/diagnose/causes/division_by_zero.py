"""division-by-zero: x/0 or 0/0, in any precision.

What happens   a divisor is exactly 0: a count of an empty mask, the standard deviation of a constant sample, a sum of
               weights that are all 0. x/0 is Inf, 0/0 is NaN. rsqrt(0), reciprocal(0) and 0 ** -p are the same.
Why it hurts   one sample is enough: its NaN reaches the loss of the whole batch.
Instead        x / (d + eps), x / d.clamp(min=1), or leave the empty case out.
Not this       a divisor that only low precision turned into 0: see fp16-underflow.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ampguard import numerics
from ampguard.diagnose import words
from ampguard.diagnose.code import accused, rewrite
from ampguard.diagnose.evidence import Evidence, Operand
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.fixes import ignored_targets, plain_divisor, shared_divisor
from ampguard.diagnose.fixes.loss_of_nothing import WEIGHT, zero_weights
from ampguard.diagnose.fixes.proposals import (
    OperandFix,
    changed_operand,
    clamp_fix,
    epsilon_fix,
    or_larger,
    precision_fixes,
    smallest_epsilon,
)
from ampguard.diagnose.fixes.under_root import under_the_root
from ampguard.diagnose.locate import lineage
from ampguard.diagnose.locate.lineage import LOOK_THROUGH
from ampguard.replay.trace import TracedOp
from ampguard.replay.variants import Variant

DIVISOR: dict[str, int] = {
    "div": 1, "true_divide": 1, "divide": 1, "remainder": 1, "fmod": 1, "reciprocal": 0, "rsqrt": 0,
    "addcdiv": 2, "floor_divide": 1,
}  # fmt: skip
NORMED = frozenset({"_weight_norm_interface", "_weight_norm"})
"""Operators that divide the rows of their first operand by the norms of these."""
LOSSES = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
SCATTERED = frozenset({"index_add", "scatter_add"})
SUMS = SCATTERED | {"sum", "count_nonzero"}
"""Operators that count, where what they add up is 0 and 1."""
MANY = 3
"""A count of samples or neighbours reaches it somewhere; small whole numbers may be factors."""
INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


@cause("division-by-zero")
def division_by_zero(evidence: Evidence) -> Finding | None:
    if evidence.given is not None or evidence.op.refused or (evidence.intended and not evidence.converts):
        return None
    position = divisor_position(evidence)
    name = words.operator(evidence)
    if evidence.op.short_name in NORMED:
        return _by_a_norm(evidence)
    if evidence.op.short_name in LOSSES:
        return _by_weights(evidence)
    if position is None:
        scalar_zero = evidence.op.short_name in DIVISOR and 0.0 in evidence.scalars
        if not scalar_zero or evidence.is_finite_in_float32:
            return None
        return Finding(
            "division-by-zero",
            f"{name} {words.place(evidence)} divides by the plain number 0.",
            weight=50,
            evidence={"divisor": 0.0},
            proposals=(_at_its_root(shared_divisor.of_a_number(evidence), plain_divisor.at_least(evidence)),),
        )
    divisor = evidence.operands[position]
    if _is_weight_by_its_size(evidence, divisor):
        return _by_its_size(evidence, divisor)
    numerator = None if position == 0 else evidence.operands[0].value
    count = (divisor.values == 0).sum().item()
    proposals = guards(evidence)
    if evidence.is_cured_by_float32:
        proposals += precision_fixes(evidence)
    what = "0/0" if numerator == 0 else "x/0"
    ignored = ignored_targets.all_ignored(evidence) if numerator == 0 else None
    if ignored is not None:
        proposals.append(ignored_targets.leave_out(evidence))
    return Finding(
        "division-by-zero",
        f"{name} {words.place(evidence)} divides by 0 ({what}): {_how_many(int(count), divisor.values.numel())}"
        f"{_in_float32(evidence)}.{ignored_targets.in_words(ignored) if ignored is not None else ''}",
        weight=50,
        evidence={"divisor": divisor.stats.as_dict(), "zero_divisors": count, "numerator": numerator},
        proposals=tuple(proposals),
    )


def _in_float32(evidence: Evidence) -> str:
    """Whether the divisor is 0 in float32 too; nothing where that was not seen."""
    was_not_asked = evidence.replayer is None and evidence.ran_in_low_precision
    return "" if was_not_asked else ", in float32 as well"


def _how_many(count: int, total: int) -> str:
    if total == 1:
        return "its only divisor is 0"
    return f"{count} of {total} divisors {'is' if count == 1 else 'are'} 0"


def _by_a_norm(evidence: Evidence) -> Finding | None:
    """Weight normalisation: g * v / |v|, where a row of v is 0."""
    dim = next((s for s in evidence.op.plain if isinstance(s, int) and not isinstance(s, bool)), 0)
    if not evidence.operands:
        return None
    rows = evidence.operands[0].values.movedim(dim, 0).flatten(1) if evidence.operands[0].values.dim() > 1 else None
    empty = int((rows == 0).all(1).sum()) if rows is not None else 0
    if not empty:
        return None

    def lifted(weight: torch.Tensor) -> torch.Tensor:
        is_zero = (weight.movedim(dim, 0).flatten(1) == 0).all(1).reshape(-1, *[1] * (weight.dim() - 1)).movedim(0, dim)
        return torch.where(is_zero, torch.full_like(weight, 1e-6), weight)

    assert rows is not None
    advice = "keep the direction `v` (weight_v, parametrizations.weight.original1) from being 0: prune or initialise the " \
             "norm `g` (weight_g, original0) instead, which may be 0"  # fmt: skip
    return Finding(
        "division-by-zero",
        f"{words.operator(evidence)} {words.place(evidence)} divides by 0 (0/0): {empty} of {len(rows)} rows of the "
        f"normalised weight are all 0, and it divides each by its norm.",
        weight=50,
        evidence={"divisor": evidence.operands[0].stats.as_dict(), "zero_divisors": empty, "numerator": 0.0},
        proposals=(Proposal("initialise-parameter", words.region(evidence), advice, trial=changed_operand(0, lifted)),),
    )


def _by_weights(evidence: Evidence) -> Finding | None:
    """A loss that divides by the sum of the weights of its targets' classes, where every class has weight 0."""
    weights = zero_weights(evidence)
    if weights is None:
        return None
    advice = "give the classes weights that are not all 0, or none at all (weight=None)"
    return Finding(
        "division-by-zero",
        f"{words.operator(evidence)} {words.place(evidence)} divides by 0 (0/0): the weights of all {weights.numel()} classes "
        f"are 0, and it divides by the sum of those of the targets.",
        weight=50,
        evidence={"divisor": numerics.stats(weights).as_dict(), "zero_divisors": 1, "numerator": 0.0},
        proposals=(Proposal("initialise-parameter", "weight", advice, trial=changed_operand(WEIGHT, torch.ones_like)),),
    )


def _is_weight_by_its_size(evidence: Evidence, divisor: Operand) -> bool:
    """Whether PyTorch itself (spectral_norm) divides a matrix that is 0 everywhere by one number."""
    if evidence.op.short_name != "div" or divisor.values.numel() != 1 or not accused.ran_inside_pytorch(evidence):
        return False
    matrix, is_given = evidence.operands[0].values, lineage.maker(evidence.trace, evidence.op, 0) is None
    return is_given and matrix.dim() > 1 and not bool((matrix != 0).any())


def _by_its_size(evidence: Evidence, divisor: Operand) -> Finding:
    """Spectral normalisation of a weight that is all 0."""

    def initialised(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        weight = args[0]
        if bool((weight != 0).any()):
            return func(*args, **kwargs)
        numbers = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(weight)
        return (weight + numbers) / torch.linalg.matrix_norm(numbers.flatten(1).float(), 2).to(weight.dtype)

    advice = (
        "initialise the weight that is normalised with random numbers; a factor of its own behind it, "
        "nn.Parameter(torch.zeros(())), may begin at 0"
    )
    return Finding(
        "division-by-zero",
        f"{words.operator(evidence)} {words.place(evidence)} divides by 0 (0/0): the weight that it normalises is 0 everywhere, "
        f"and so is its norm.",
        weight=50,
        evidence={"divisor": divisor.stats.as_dict(), "zero_divisors": 1, "numerator": 0.0},
        proposals=(
            Proposal(
                "initialise-parameter",
                words.region(evidence),
                advice,
                trial=lambda e: Variant(at_places={e.op.place: initialised}),
            ),
        ),
    )


def divisor_position(evidence: Evidence) -> int | None:
    """Which operand is 0 at the bad element and is divided by; None where none is."""
    name = evidence.op.short_name
    if name == "pow" and evidence.operands:
        if evidence.op.name == "aten.pow.Scalar":
            return None  # the base is a plain number
        exponent = evidence.scalars[0] if evidence.scalars else (evidence.operands[-1].value or 0.0)
        return 0 if exponent < 0 and _has_zero(evidence.operands[0]) else None
    position = divisor_of(evidence)
    if position is None:
        return None
    divisor = evidence.operands[position]
    return position if _has_zero(divisor) or _vanishes(divisor) else None


def divisor_of(evidence: Evidence) -> int | None:
    """Which operand is divided by, whatever it is; None where the operator does not divide."""
    position = DIVISOR.get(evidence.op.short_name)
    return position if position is not None and position < len(evidence.operands) else None


def _vanishes(operand: Operand) -> bool:
    """Whether the element is one of those on their way to 0 (below the smallest normal number), which others have reached."""
    values, element = operand.values, operand.contributing
    if not values.is_floating_point() or numerics.is_low_precision(values.dtype):
        return False
    return bool((element.abs() < torch.finfo(values.dtype).tiny).any()) and bool((values == 0).any())


def _has_zero(operand: Operand) -> bool:
    return bool((operand.contributing == 0).any())


def guards(evidence: Evidence) -> list[Proposal]:
    """A count wants a divisor of at least 1; a divisor that is never negative, at least an epsilon; any, one added."""
    position = divisor_position(evidence)
    position = divisor_of(evidence) if position is None else position
    if position is None:
        return []
    divisor = evidence.operands[position]
    proposals = []
    epsilon = smallest_epsilon(evidence)
    counts = is_count(evidence, position, divisor)
    shared = shared_divisor.of_a_tensor(evidence, position, counts)
    if counts or shared is not None:
        at_least_one = OperandFix(
            "guard-empty",
            position,
            rewrite.clamped(1, None),
            lambda t: t.clamp(min=1),
            lambda t: bool((t == 0).any()),
            "use a divisor of at least 1 (.clamp(min=1))",
        ).proposal(evidence)
        proposals.append(_at_its_root(shared, at_least_one))
    if shared is not None:
        return proposals
    if not divisor.values.is_floating_point() and not divisor.values.is_complex():
        return proposals
    added = epsilon_fix(evidence, position, epsilon)
    proposals.append(or_larger(added, lambda larger: epsilon_fix(evidence, position, larger), evidence))
    if not divisor.values.is_complex() and bool((divisor.values >= 0).all()):
        proposals.append(clamp_fix(evidence, position, epsilon, None))
    root = under_the_root(evidence, position)
    return [*root, *proposals]


def _at_its_root(shared: Proposal | None, here: Proposal) -> Proposal:
    """The change of what several lines divide by, and that of the accused line where it is not enough."""
    return dataclasses.replace(shared, otherwise=here) if shared is not None else here


def is_count(evidence: Evidence, position: int, divisor: Operand) -> bool:
    """Whether the divisor counts something: integers, whole numbers, or a sum over values that can only be 0 and 1."""
    if not divisor.values.is_floating_point():
        return not divisor.values.is_complex()
    maker = lineage.maker(evidence.trace, evidence.op, position)
    if maker is None:
        return _holds_counts(divisor.values)
    if any(not t.dtype.is_floating_point and not t.dtype.is_complex for t in maker.outputs[:1]):
        return True
    if maker.short_name not in SUMS:
        return False
    if maker.short_name not in SCATTERED and _is_mask(evidence, maker, 0):
        return True
    call = evidence.capture(maker.index)
    if call is None or not call.tensors:
        return False
    summed = [t for t in call.tensors if t.is_floating_point()] if maker.short_name in SCATTERED else call.tensors[:1]
    return all(bool(((t == 0) | (t == 1)).all()) for t in summed) and any(bool((t == 1).any()) for t in summed)


def _holds_counts(values: torch.Tensor) -> bool:
    """Whether several numbers that were given are whole ones from 0 on, and some large: class counts, degrees."""
    if values.is_complex() or values.numel() < 2 or not bool(torch.isfinite(values).all()):
        return False
    return bool((values >= 0).all() and (values == values.round()).all() and (values >= MANY).any())


def _is_mask(evidence: Evidence, op: TracedOp, position: int, depth: int = 0) -> bool:
    """Whether an operand is made of booleans or integers: cast, or a product of such."""
    made = op.inputs[position].made_by if position < len(op.inputs) else None
    if position < len(op.inputs) and not op.inputs[position].dtype.is_floating_point:
        return True
    while made is not None:
        maker = evidence.trace.ops[made[0]]
        if not maker.inputs or maker.outputs[0].dtype in INTEGERS or maker.inputs[0].dtype in INTEGERS:
            return bool(maker.inputs)
        if maker.short_name == "mul" and depth < 4:
            return all(_is_mask(evidence, maker, i, depth + 1) for i in range(len(maker.inputs)))
        if maker.short_name not in LOOK_THROUGH:
            return False
        made = maker.inputs[0].made_by
    return False
