"""Rows of a softmax that a mask left without a key, and the masks that did it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ampguard import compat
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.locate import lineage
from ampguard.diagnose.locate.chain import Link
from ampguard.diagnose.locate.contributions import BY_SAMPLE, ROWS_AND_COLUMNS, contributing
from ampguard.numerics import NEG_INF

MAXIMA = frozenset({"amax", "max", "_softmax", "softmax"})


def is_masks_doing(evidence: Evidence) -> bool:
    """Whether the infinities at which the chain begins are a mask's: rows of a softmax have nothing else.

    A mask is added to the scores or put in their place. An infinity that came through a product with weights was data.
    """
    links = evidence.chain.links
    if evidence.converts and (empty_rows(evidence) or has_keyless_mask(evidence)):
        here = next((i for i, link in enumerate(links) if link is evidence.link), 0)
        return not any(_is_mixed(link) for link in links[here + 1 :])
    at = next(iter(logsumexps_of_empty_rows(evidence)), None)
    return at is not None and not any(_is_mixed(link) for link in links[links.index(at.link) + 1 :])


def logsumexps_of_empty_rows(evidence: Evidence) -> Iterator[Evidence]:
    """The same failure seen at each logsumexp that an intended -Inf came through because its row had nothing else.

    The earliest first.
    """
    if not evidence.intended:
        return
    for link in reversed(evidence.chain.links):
        if link.op.short_name == "logsumexp" and link.kind == NEG_INF:
            at = Evidence(evidence.bad, evidence.chain, evidence.outcome, evidence.replayer)
            at.link = link
            if empty_rows(at):
                yield at


def _is_mixed(link: Link) -> bool:
    """Whether the operator multiplied the bad element with others and summed up: not so where it was the bias."""
    op = link.op
    if op.short_name in BY_SAMPLE:
        return True
    first = ROWS_AND_COLUMNS.get(op.short_name)
    if first is None:
        return False
    for operand, tensor in enumerate(op.inputs[:first]):
        test = contributing(op, operand, link.result, link.flat)
        if tensor.bad is not None and (test is None or bool(test(tensor.bad.flat).any())):
            return False
    return True


def has_keyless_mask(evidence: Evidence) -> bool:
    """Whether the operator was handed a mask of which a row leaves no key."""
    is_kept = true_means_kept(evidence)
    return any(bool(keyless(mask, is_kept).any()) for mask in masks_handed_in(evidence))


def masks_handed_in(evidence: Evidence) -> Iterator[Tensor]:
    """The operands of a fused attention that are masks."""
    call = evidence.call
    if call is None:
        return
    names = [a.name for a in compat.schema_of(call.func).arguments]
    for name, mask in [*zip(names, call.args, strict=False), *call.kwargs.items()]:
        if isinstance(mask, Tensor) and mask.dim() and ("mask" in name or name == "attn_bias"):
            yield mask


def true_means_kept(evidence: Evidence) -> bool:
    """What True of a boolean mask means: in scaled_dot_product_attention "may be looked at", elsewhere "masked"."""
    return "scaled_dot_product" in evidence.op.short_name


def keyless(mask: Tensor, is_kept: bool) -> Tensor:
    """Which rows of a mask leave no key. `is_kept`: True of a boolean mask means that a key may be looked at."""
    if mask.dtype == torch.bool:
        return ~mask.any(-1) if is_kept else mask.all(-1)
    return (mask == -math.inf).all(-1) if mask.is_floating_point() else torch.zeros(mask.shape[:-1], dtype=torch.bool)


def empty_rows(evidence: Evidence) -> tuple[int, int, int] | None:
    """(rows that are all -Inf, rows, dim) of the operand that a softmax-like operator reduces along one dim."""
    if not evidence.operands:
        return None
    values = evidence.operands[0].values
    name = evidence.op.short_name
    dim: int | None
    if "softmax" in name or name == "logsumexp":
        dim = _dim(evidence, values)
    elif name in ("sub", "subtract") and len(evidence.operands) == 2:
        dim = _dim_of_logsumexp(evidence, values)
        if dim is None and _is_normalised(evidence):
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


def _dim_of_logsumexp(evidence: Evidence, values: Tensor) -> int | None:
    """`x - x.logsumexp(dim)`: a log-softmax written by hand, and that of `torch.distributions.Categorical`."""
    total = lineage.maker(evidence.trace, evidence.op, 1)
    if total is None or total.short_name != "logsumexp" or total.inputs[0].shape != tuple(values.shape):
        return None
    call = evidence.capture(total.index)
    dims = call.args[1] if call is not None and len(call.args) > 1 else ()
    return int(dims[0]) % values.dim() if isinstance(dims, (list, tuple)) and len(dims) == 1 and values.dim() else None


def _dim_of_maximum(evidence: Evidence, values: Tensor) -> int | None:
    """`x - x.max(dim)`: a softmax written by hand."""
    maker = lineage.maker(evidence.trace, evidence.op, 1)
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
