"""masked-softmax: a softmax or log-softmax row whose entries are all -Inf.

What happens   the mask leaves a row without a key (a padded query, an empty sample): softmax(-Inf, ..., -Inf) is 0/0.
Why it hurts   one such row poisons every weight gradient, even if the sample is not in the loss.
Instead        give every row at least one key (keep the diagonal, or key 0), or mask with torch.finfo(dtype).min.
Not this       a finite mask constant that low precision turned into -Inf: see mask-overflow.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from ampguard.diagnose import words
from ampguard.diagnose.code import accused
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, Trial, cause
from ampguard.diagnose.fixes import mask_code
from ampguard.diagnose.fixes.one_sample import left_out
from ampguard.diagnose.fixes.proposals import at_the_head, changed_operand
from ampguard.diagnose.locate import lineage
from ampguard.diagnose.locate.rows import (
    empty_rows,
    keyless,
    logsumexps_of_empty_rows,
    masks_handed_in,
    true_means_kept,
)
from ampguard.replay.operators import flat_tensors
from ampguard.replay.variants import Variant


@cause("masked-softmax")
def masked_softmax(evidence: Evidence) -> Finding | None:
    if evidence.op.refused:
        return None
    if evidence.kind == "nan" and (found := _by_mask_operand(evidence)) is not None:
        return found
    if not evidence.intended:
        return _by_hand_with_exp(evidence)
    rows = empty_rows(evidence) if evidence.converts else None
    if rows is None:
        return _by_logsumexp(evidence)
    count, total, dim = rows
    if evidence.op.short_name in ("sub", "subtract"):
        return _finding(evidence, count, total, at_the_head(_shifted_with_a_key(dim)), at_the_head(_finite))
    return _finding(evidence, count, total, changed_operand(0, lambda t: _with_a_key(t, dim)), at_the_head(_finite))


def row_fixes(evidence: Evidence) -> tuple[Proposal, ...]:
    """What a softmax needs whose empty rows the loss does not see and the derivative does; nothing where it has none."""
    rows = empty_rows(evidence) if "softmax" in evidence.op.short_name else None
    if rows is None:
        return ()
    count, total, dim = rows
    return _finding(
        evidence, count, total, changed_operand(0, lambda t: _with_a_key(t, dim)), at_the_head(_finite)
    ).proposals


def _by_logsumexp(evidence: Evidence) -> Finding | None:
    """A log-partition over nothing: logsumexp of a row of -Inf is -Inf, and so is the loss that is made of it."""
    at = next(iter(logsumexps_of_empty_rows(evidence)), None)
    rows = empty_rows(at) if at is not None else None
    if at is None or rows is None:
        return None
    count, total, dim = rows
    found = _finding(
        at,
        count,
        total,
        lambda _: changed_operand(0, lambda t: _with_a_key(t, dim))(at),
        lambda _: at_the_head(_finite)(at),
        consequence="their logsumexp is -Inf",
    )
    filtering = left_out(at, "its mask forbids every path")
    proposals = found.proposals if filtering is None else (filtering, *found.proposals)
    return dataclasses.replace(found, op=at.op, proposals=proposals)


def _by_mask_operand(evidence: Evidence) -> Finding | None:
    """An attention that was handed its mask whole (fused layers, scaled_dot_product_attention) and gives NaN."""
    found = (_rows_of_mask(evidence, mask) for mask in masks_handed_in(evidence))
    return next((rows for rows in found if rows is not None), None)


def _rows_of_mask(evidence: Evidence, mask: Tensor) -> Finding | None:
    """The finding where rows of the mask leave no key and the operator is finite once they have one."""
    call = evidence.call
    is_kept = true_means_kept(evidence)
    empty = keyless(mask, is_kept)
    if call is None or not bool(empty.any()):
        return None
    freed = _mask_with_a_key(mask, is_kept)
    args = [freed if a is mask else a for a in call.args]
    kwargs = {name: freed if a is mask else a for name, a in call.kwargs.items()}
    with torch.no_grad():
        output = call.func(*args, **kwargs)
    value = evidence.element(output[evidence.link.result] if isinstance(output, (tuple, list)) else output)
    if value is None or not math.isfinite(value):
        return None
    position = next(i for i, t in enumerate(call.tensors) if t is mask)
    trial = changed_operand(position, lambda t: _mask_with_a_key(t, is_kept))
    is_float = mask.is_floating_point()
    found = _finding(
        evidence,
        int(empty.sum()),
        empty.numel(),
        trial,
        changed_operand(position, _finite_mask),
        "-Inf" if is_float else str(not is_kept),
    )
    return found if is_float else dataclasses.replace(found, proposals=found.proposals[:1])


def _mask_with_a_key(mask: Tensor, is_kept: bool) -> Tensor:
    """The same mask, key 0 given back to rows that have none."""
    first = torch.arange(mask.shape[-1], device=mask.device) == 0
    free = torch.tensor(is_kept if mask.dtype == torch.bool else 0.0, dtype=mask.dtype, device=mask.device)
    return torch.where(keyless(mask, is_kept).unsqueeze(-1) & first, free, mask)


def _finding(
    evidence: Evidence,
    count: int,
    total: int,
    trial: Trial,
    finite: Trial,
    entry: str = "-Inf",
    consequence: str = "their softmax is NaN",
) -> Finding:
    return Finding(
        "masked-softmax",
        f"{words.operator(evidence)} {words.place(evidence)} was given {count} of {total} rows in which every entry is "
        f"{entry}: the mask leaves them no key, and {consequence} in any precision.",
        weight=84,
        evidence={"empty_rows": count, "rows": total},
        proposals=(
            or_in_words(
                mask_code.open_rows(evidence),
                Proposal(
                    "fix-mask",
                    words.region(evidence),
                    f"give every row at least one key, e.g. mask[..., 0] &= ~mask.all(-1), before: {_masking(evidence)}",
                    trial=trial,
                ),
            ),
            or_in_words(
                mask_code.finite_constant(evidence),
                Proposal(
                    "mask-value",
                    words.region(evidence),
                    "mask with torch.finfo(scores.dtype).min in place of -Inf: the row becomes uniform",
                    trial=finite,
                ),
            ),
        ),
    )


def or_in_words(as_code: Proposal | None, in_words: Proposal) -> Proposal:
    """The change of a line, or what it is meant to do, where that line alone does not cure."""
    return dataclasses.replace(as_code, otherwise=in_words) if as_code is not None else in_words


def _masking(evidence: Evidence) -> str:
    """The line that puts -Inf where the mask is; where that is not one operator's doing, the accused line."""
    head = evidence.chain.head.op
    masks = head.short_name in ("masked_fill", "where") and evidence.given is None
    return (words.code_at(head.line) if masks else None) or accused.statement(evidence)


def _by_hand_with_exp(evidence: Evidence) -> Finding | None:
    """`exp(s) / exp(s).sum()` with a row of -Inf: 0/0 from a row of exact zeros that were infinities."""
    if evidence.op.short_name != "div" or len(evidence.operands) < 2 or evidence.kind != "nan":
        return None
    top, total = lineage.maker(evidence.trace, evidence.op, 0), lineage.maker(evidence.trace, evidence.op, 1)
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
        return func(_with_a_key(flat_tensors(args, kwargs)[0], -1), *args[1:], **kwargs)

    place = top.place
    return _finding(
        evidence,
        count,
        empty.numel(),
        lambda e: Variant(at_places={place: with_a_key}),
        lambda e: Variant(at_places={place: _finite}),
    )


def _with_a_key(scores: Tensor, dim: int) -> Tensor:
    """The same scores, key 0 of rows that are all -Inf set to 0. Any other score of it gives the same softmax."""
    empty = (scores == -math.inf).all(dim=dim, keepdim=True)
    shape = [scores.shape[dim] if d == dim % scores.dim() else 1 for d in range(scores.dim())]
    first = (torch.arange(scores.shape[dim], device=scores.device) == 0).reshape(shape)
    return torch.where(empty & first, torch.zeros_like(scores), scores)


def _shifted_with_a_key(dim: int) -> Any:
    """`x - x.max(dim)`: the maximum of a row that has been given key 0 is 0."""

    def intervention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scores, maxima = args[0], args[1]
        finite = torch.where(maxima == -math.inf, torch.zeros_like(maxima), maxima)
        return func(_with_a_key(scores, dim), finite, *args[2:], **kwargs)

    return intervention


def _finite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator with its type's lowest number in place of -Inf."""
    return func(*(_finite_mask(a) if isinstance(a, Tensor) else a for a in args), **kwargs)


def _finite_mask(mask: Tensor) -> Tensor:
    return mask.clamp(min=torch.finfo(mask.dtype).min) if mask.is_floating_point() else mask
