"""Fixes for bad derivatives: keep the operand of the differentiated operator away from where it has none.

Each is tried on the failing step, forward and backward, with the operand changed in both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampguard.diagnose import words
from ampguard.diagnose.causes.empty_reduction import reduction_fixes
from ampguard.diagnose.causes.masked_softmax import row_fixes
from ampguard.diagnose.code import accused, rewrite
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Proposal
from ampguard.diagnose.fixes import stable
from ampguard.diagnose.fixes.proposals import OperandFix, clamp_fix, epsilon_fix
from ampguard.diagnose.fixes.under_root import under_the_root
from ampguard.diagnose.gradients import GradientEvidence
from ampguard.numerics import is_low_precision
from ampguard.replay.operators import flat_tensors
from ampguard.replay.trace import TracedOp
from ampguard.replay.variants import Variant

ROOTS = frozenset(["sqrt", "rsqrt", "pow", "log", "log2", "log10", "reciprocal", "norm", "linalg_vector_norm", "cbrt"])
BETWEEN_ONES = frozenset(["acos", "asin", "atanh", "erfinv"])
DIVISIONS = frozenset(["div", "true_divide", "floor_divide", "xlogy", "atan2"])
GROWING = frozenset(["exp", "exp2", "expm1", "sinh", "cosh"])
LINEAR = frozenset(
    ["_to_copy", "clone", "view", "mul", "add", "sub", "neg", "sum", "mean", "detach", "expand", "t", "transpose"]
)
DECOMPOSITIONS = frozenset(["linalg_eigh", "_linalg_eigh", "linalg_svd", "_linalg_svd", "linalg_eig", "linalg_qr"])


def operand_value(evidence: Evidence) -> float | None:
    """The number of the differentiated operator's operand that the bad element goes back to, where it is one number."""
    operands = evidence.float_operands
    position = 1 if evidence.op.short_name in DIVISIONS and len(operands) > 1 else 0
    return operands[position].value if position < len(operands) else None


def operand_fixes(evidence: GradientEvidence) -> tuple[Proposal, ...]:
    """What could be changed at the differentiated operator, the likeliest first."""
    forward = evidence.forward
    name = forward.op.short_name
    edge = 1e-3 if any(is_low_precision(t.dtype) for t in forward.op.inputs) else 1e-6
    fixes: list[Proposal] = []
    if evidence.is_hidden:
        fixes += row_fixes(forward) or reduction_fixes(forward) or [_masked_operand(forward)]
    infinite = _infinite_operands(forward) if not evidence.is_hidden else {}
    if infinite:
        fixes.append(_bounded_operands(forward, infinite))
    elif name in DIVISIONS:
        position = min(1, len(forward.op.inputs) - 1)
        fixes += under_the_root(forward, position)
        fixes.append(epsilon_fix(forward, position, edge))
    elif name in BETWEEN_ONES:
        fixes.append(clamp_fix(forward, 0, -1 + edge, 1 - edge))
    elif name in DECOMPOSITIONS:
        fixes.append(_with_spread_diagonal(forward))
    elif name in ROOTS:
        if (
            not forward.op.in_backward
        ):  # a hand-written backward has saved what the form is to replace, and not its operand
            fixes += stable.proposals(forward)
        fixes.append(epsilon_fix(forward, 0, edge))
        if not any(t.dtype.is_complex for t in forward.op.inputs):  # complex numbers have no order
            fixes.append(clamp_fix(forward, 0, edge, None))
    elif name in GROWING and evidence.is_hidden:
        low = any(t.dtype == torch.float16 for t in forward.op.inputs)
        fixes.insert(0, clamp_fix(forward, 0, None, 10.0 if low else 80.0))
        fixes[:0] = stable.proposals(forward)
    elif _is_elementwise(forward.op) and not evidence.is_hidden:
        fixes.append(_away_from_here(forward, edge))
    return tuple(fixes)


def _infinite_operands(forward: Evidence) -> dict[int, tuple[bool, bool]]:
    """For each operand that is infinite where the derivative is bad: whether downwards, whether upwards."""
    found = {}
    for position, operand in enumerate(forward.operands):
        values = operand.contributing
        if values.is_floating_point() and bool(torch.isinf(values).any()):
            found[position] = (bool((values == -math.inf).any()), bool((values == math.inf).any()))
    return found


def _bounded_operands(forward: Evidence, infinite: dict[int, tuple[bool, bool]]) -> Proposal:
    """Infinities that a function takes (`logaddexp`) and its derivative does not: large finite numbers in their place."""
    size = 1e4 if any(t.dtype == torch.float16 for t in forward.op.inputs) else 1e30
    low = -size if any(down for down, _ in infinite.values()) else None
    high = size if any(up for _, up in infinite.values()) else None

    def bounded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [t for i, t in enumerate(flat_tensors(args, kwargs)) if i in infinite]
        return func(*(a.clamp(low, high) if any(a is t for t in tensors) else a for a in args), **kwargs)

    line, name = accused.line_of(forward), forward.op.short_name
    chosen = accused.accused_alone(forward, line.expressions(name, False)) if line is not None else None
    operands = [chosen.operand(name, i, accused.argument_name(forward.op, i)) for i in infinite] if chosen else []
    bounds = ", ".join(f"{n}={rewrite.literal(b)}" for n, b in (("min", low), ("max", high)) if b is not None)
    how = f"clamp({bounds}) what {words.operator(forward)} is given in: {accused.statement(forward)}"
    if line is not None and chosen is not None and operands and None not in operands:
        changes = [(chosen, operand) for operand in operands if operand is not None]
        how = rewrite.with_changes(line, changes, rewrite.clamped(low, high))
    how = f"a large finite number in place of the infinity: {how}"
    return Proposal(
        "mask-value", words.region(forward), how, trial=lambda _: Variant(at_places={forward.op.place: bounded})
    )


def _is_elementwise(op: TracedOp) -> bool:
    """Whether the operator is a function of each element by itself: moving its operand by a little makes sense."""
    floats = [tuple(t.shape) for t in op.inputs if t.dtype.is_floating_point and t.shape]
    return bool(floats) and op.short_name not in LINEAR and set(floats) == {tuple(op.outputs[0].shape)}


def _masked_operand(evidence: Evidence) -> Proposal:
    """The safe where: give the function 1 in place of the operands that it has no value or derivative for."""
    code = accused.statement(evidence)
    name = words.operator(evidence)

    def safe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operand = args[0]
        if not isinstance(operand, Tensor):
            return func(*args, **kwargs)
        with torch.no_grad():
            result = evidence.op.func(*args, **kwargs)
        first = result[0] if isinstance(result, (tuple, list)) else result
        if first.shape == operand.shape:
            ok = torch.isfinite(first)
            infinite = [i for i, a in enumerate(args) if _is_bad_beside(a, ok)]
            if infinite:  # -Inf - -Inf: each of them
                others = (torch.where(ok, a, torch.ones_like(a)) if i in infinite else a for i, a in enumerate(args))
                return func(*others, **kwargs)
        else:
            rows = torch.isfinite(first).reshape(first.shape[0], -1).all(1)
            ok = rows.reshape(-1, *[1] * (operand.dim() - 1)).expand_as(operand)
        return func(torch.where(ok, operand, torch.ones_like(operand)), *args[1:], **kwargs)

    in_words = Proposal(
        "stable-form",
        words.region(evidence),
        f"mask the operand of {name}, not its result: x = torch.where(mask, x, 1.0) before: {code}",
        trial=lambda e: Variant(at_places={evidence.op.place: safe}),
    )
    written = _with_safe_where(evidence)
    return dataclasses.replace(written, otherwise=in_words) if written is not None else in_words


def _is_bad_beside(operand: Any, ok: Tensor) -> bool:
    """Whether an operand is not finite where the result is not."""
    if not isinstance(operand, Tensor) or operand.shape != ok.shape or not operand.is_floating_point():
        return False
    return bool((~ok & ~torch.isfinite(operand)).any())


def _with_safe_where(evidence: Evidence) -> Proposal | None:
    """The changed line, where the function's domain can be written and the text tells which expression it is."""
    domain = _domain(evidence.op)
    if domain is None or accused.is_in_place(evidence.op):
        return None
    position = 1 if evidence.op.short_name in DIVISIONS else 0

    def safe(tensor: Tensor) -> Tensor:
        return torch.where(domain.holds(tensor), tensor, domain.inside)

    fix = OperandFix(
        "stable-form",
        position,
        rewrite.masked(domain.written, domain.inside),
        safe,
        lambda t: not bool(domain.holds(t).all()),
        "",
    )
    found = fix.changed_line(evidence)
    if found is None:
        return None
    how = f"mask the operand of {words.operator(evidence)}, not its result: {found[0]}"
    return Proposal("stable-form", words.region(evidence), how, trial=found[1])


@dataclass(frozen=True, slots=True)
class Domain:
    """Where a function has a finite derivative: as it is written, as it is tested, and a point inside."""

    written: str
    holds: Callable[[Tensor], Tensor]
    inside: float


POSITIVE = Domain("{} > 0", lambda t: t > 0, 1.0)
NOT_ZERO = Domain("{} != 0", lambda t: t != 0, 1.0)
BELOW_ONE = Domain("{}.abs() < 1", lambda t: t.abs() < 1, 0.0)


def _domain(op: TracedOp) -> Domain | None:
    name = op.short_name
    if name in BETWEEN_ONES:
        return BELOW_ONE
    if name in ("div", "true_divide", "reciprocal"):
        return NOT_ZERO
    if name == "pow":
        exponent = op.scalars[0] if len(op.scalars) == 1 and op.name.endswith(".Tensor_Scalar") else None
        return None if exponent is None else NOT_ZERO if exponent == int(exponent) else POSITIVE
    return POSITIVE if name in ("sqrt", "rsqrt", "log", "log2", "log10") else None


def _with_spread_diagonal(evidence: Evidence) -> Proposal:
    """Equal eigenvalues, or columns that depend on each other: the derivative divides by their differences, or by 0.

    One number on the whole diagonal keeps columns independent; eigenvalues stay equal unless it grows along it.
    """
    matrices = evidence.operands[0].values if evidence.operands else None
    peak = float(matrices.abs().max()) if matrices is not None and matrices.numel() else 1.0
    apart = 10.0 ** math.floor(math.log10(peak * 1e-4)) if math.isfinite(peak) and peak > 0 else 1e-4
    is_of_columns = evidence.op.short_name == "linalg_qr"

    def spread(matrix: Tensor) -> Tensor:
        size = min(matrix.shape[-2:])
        steps = torch.zeros(matrix.shape[-2:], dtype=matrix.dtype, device=matrix.device)
        growing = torch.arange(size, dtype=matrix.dtype, device=matrix.device)
        steps[range(size), range(size)] = (torch.ones_like(growing) if is_of_columns else growing) * apart
        return matrix + steps

    term = f"{rewrite.literal(apart)} * {_written_diagonal(evidence.op, is_of_columns)}"
    kind = "singular values" if "svd" in evidence.op.short_name else "eigenvalues"
    aim = "the columns independent" if is_of_columns else f"the {kind} apart"
    return OperandFix("add-epsilon", 0, rewrite.plus(term), spread, lambda t: True, f"keep {aim}: x + {term}").proposal(
        evidence
    )


def _written_diagonal(op: TracedOp, is_constant: bool) -> str:
    """The matrix with ones, or with 0, 1, 2 ..., on its diagonal, on the operand's device."""
    rows, columns = op.inputs[0].shape[-2:]
    device = rewrite.on_device(op.device)
    if is_constant:
        return f"torch.eye({rows}, {columns}{device})"
    steps = f"torch.arange({columns}{device})"
    return f"torch.diag({steps})" if rows == columns else f"{steps} * torch.eye({rows}, {columns}{device})"


def _away_from_here(evidence: Evidence, edge: float) -> Proposal:
    """Any other function: move its operand by a little."""
    return OperandFix(
        "add-epsilon",
        0,
        rewrite.plus(edge),
        lambda t: t + edge if t.is_floating_point() else t,
        lambda t: True,
        f"keep the operand of {words.operator(evidence)} away from this point: add {rewrite.literal(edge)} to it",
    ).proposal(evidence)
