"""masked-softmax: a softmax or log-softmax row whose entries are all -Inf.

What happens   the mask leaves a row without a key (a padded query, an empty sample): softmax(-Inf, ..., -Inf) is 0/0.
Why it hurts   one such row poisons every weight gradient, even if the sample is not in the loss.
Instead        give every row at least one key (keep the diagonal, or key 0), or mask with torch.finfo(dtype).min.
Not this       a finite mask constant that low precision turned into -Inf: see mask-overflow.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.proposals import changed_operand
from ampguard.replay.operators import flat_tensors
from ampguard.replay.variants import Variant

MAXIMA = frozenset({"amax", "max", "_softmax"})


@cause("masked-softmax")
def masked_softmax(evidence: Evidence) -> Finding | None:
    if evidence.op.refused or not evidence.intended or not evidence.converts:
        return _by_hand_with_exp(evidence) if not evidence.intended and not evidence.op.refused else None
    rows = _empty_rows(evidence)
    if rows is None:
        return None
    count, total, dim = rows
    return _finding(evidence, count, total, changed_operand(0, lambda t: _with_a_key(t, dim)))


def _finding(evidence: Evidence, count: int, total: int, trial: Any) -> Finding:
    return Finding(
        "masked-softmax",
        f"{words.operator(evidence)} {words.place(evidence)} was given {count} of {total} rows in which every entry is "
        f"-Inf: the mask leaves them no key, and their softmax is NaN in any precision.",
        weight=84,
        evidence={"empty_rows": count, "rows": total},
        proposals=(
            Proposal(
                "fix-mask",
                words.region(evidence),
                "give every row at least one key, e.g. mask[..., 0] &= ~mask.all(-1), before: " + words.code(evidence),
                trial=trial,
            ),
            Proposal(
                "mask-value",
                words.region(evidence),
                "mask with torch.finfo(scores.dtype).min instead of -inf: the row becomes uniform",
                trial=changed_operand(0, lambda t: t.clamp(min=torch.finfo(t.dtype).min)) if trial else None,
            ),
        ),
    )


def _empty_rows(evidence: Evidence) -> tuple[int, int, int] | None:
    """(rows that are all -Inf, rows, dim) of the operand that a softmax-like operator reduces along one dim."""
    if not evidence.operands:
        return None
    values = evidence.operands[0].values
    name = evidence.op.short_name
    dim: int | None
    if "softmax" in name or name == "logsumexp":
        dim = _dim(evidence, values)
    elif name in ("sub", "subtract") and len(evidence.operands) == 2 and _is_normalised(evidence):
        dim = _dim_of_maximum(evidence, values)
    else:
        return None
    if dim is None:
        return None
    empty = (values == -math.inf).all(dim=dim)
    count = int(empty.sum())
    return (count, empty.numel(), dim) if count else None


def _dim(evidence: Evidence, values: Tensor) -> int:
    args = evidence.call.args if evidence.call is not None else ()
    value = args[1] if len(args) > 1 else -1
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    return value % values.dim() if isinstance(value, int) and values.dim() else 0


def _dim_of_maximum(evidence: Evidence, values: Tensor) -> int | None:
    """`x - x.max(dim)`: a softmax written by hand."""
    maker = evidence.maker(1)
    if maker is None or maker.short_name not in MAXIMA:
        return None
    shape = evidence.operands[1].values.shape
    dims = [d for d in range(values.dim()) if d < len(shape) and shape[d] == 1 != values.shape[d]]
    return dims[0] if len(dims) == 1 else values.dim() - 1


def _is_normalised(evidence: Evidence) -> bool:
    """Whether `x - max` goes on to be normalised: exp of it divided by its sum, or its log-sum subtracted from it."""
    ops = evidence.trace.ops
    shifted = {(evidence.op.index, 0)}
    exponentials = {
        (op.index, 0) for op in ops if op.short_name == "exp" and any(t.made_by in shifted for t in op.inputs)
    }
    return any(
        (op.short_name in ("div", "mul") and op.inputs and op.inputs[0].made_by in exponentials)
        or (op.short_name == "sub" and op.inputs and op.inputs[0].made_by in shifted)
        for op in ops
    )


def _by_hand_with_exp(evidence: Evidence) -> Finding | None:
    """`exp(s) / exp(s).sum()` with a row of -Inf: 0/0 from a row of exact zeros that were infinities."""
    if evidence.op.short_name != "div" or len(evidence.operands) < 2 or evidence.kind != "nan":
        return None
    top, total = evidence.maker(0), evidence.maker(1)
    if top is None or total is None or top.short_name not in ("exp", "exp2") or total.short_name != "sum":
        return None
    call = evidence.capture(top.index)
    if call is None:
        return None
    scores = call.tensors[0]
    empty = (scores == -math.inf).all(dim=-1)
    count = int(empty.sum())
    if not count:
        return None

    def with_a_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(_with_a_key(flat_tensors(args, kwargs)[0], -1), **kwargs)

    return _finding(evidence, count, empty.numel(), lambda e: Variant(at_places={top.place: with_a_key}))


def _with_a_key(scores: Tensor, dim: int) -> Tensor:
    """The same scores, with rows that are all -Inf set to 0."""
    empty = (scores == -math.inf).all(dim=dim, keepdim=True)
    return torch.where(empty, torch.zeros_like(scores), scores)
