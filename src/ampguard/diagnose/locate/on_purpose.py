"""Infinities that the code wrote itself: a literal, a mask in log space."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ampguard.diagnose.locate.chain import Link
from ampguard.numerics import NAN, NEG_INF, POS_INF
from ampguard.replay.operators import flat_tensors
from ampguard.replay.trace import Trace

LOGARITHMS = frozenset({"log", "log2", "log10"})


def makes_infinity_on_purpose(link: Link) -> bool:
    """An operator without a non-finite operand that was handed an infinite constant and put it in the result."""
    if link.kind == NAN:
        return False
    wanted = math.inf if link.kind == POS_INF else -math.inf
    return any(scalar == wanted for scalar in link.op.scalars)


def is_mask_in_log_space(trace: Trace, links: Sequence[Link]) -> bool:
    """Whether the chain begins at the logarithm of zeros and ones (`scores + mask.float().log()`) and a softmax makes NaN of it:
    a row without a one has no key. (The logarithm of a probability that is 0 is no mask, which it may look like elsewhere.)"""
    head = links[-1].op
    if head.short_name not in LOGARITHMS or links[-1].kind != NEG_INF or not head.inputs:
        return False
    made = next((link for link in reversed(links) if link.kind != NEG_INF), None)
    if made is None or "softmax" not in made.op.short_name:
        return False
    by = head.inputs[0].made_by
    maker = trace.ops[by[0]] if by is not None else None
    if maker is not None and maker.short_name == "_to_copy" and maker.inputs and maker.inputs[0].dtype == torch.bool:
        return True
    values = flat_tensors(head.args, {})[:1] if head.args is not None else []
    return any(bool(((v == 0) | (v == 1)).all()) for v in values)
