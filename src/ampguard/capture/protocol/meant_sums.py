"""Gradients that are summed up on purpose: the optimizer's weights are a function of that sum.

Dual averaging and mirror descent keep the sum of all gradients (some in `.grad` itself), and compute the weights from it anew in
each step, not from what they were: within a tensor, a larger sum never makes a larger weight. Where steps are added up, weights
depend on their beginning and on the way, and no tensor of some size is in that order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ampguard import compat

FEWEST, MOST = 32, 4096
"""Elements of a tensor that is looked at; of a larger one, so many."""
MOST_TENSORS = 8


def are_meant(parameters: Iterable[Tensor]) -> bool:
    """Whether each weight is in the opposite order of its gradient, element by element. Waits for the device."""
    with torch.no_grad(), compat.unseen():
        held = [(p, p.grad) for p in parameters if p.grad is not None and p.numel() >= FEWEST]
        plain = [(p, grad) for p, grad in held if grad.layout == torch.strided and compat.has_values(grad)]
        return bool(plain) and all(_is_in_opposite_order(p, grad) for p, grad in plain[:MOST_TENSORS])


def _is_in_opposite_order(weight: Tensor, gradient: Tensor) -> bool:
    stride = max(1, weight.numel() // MOST)
    sums, order = gradient.detach().reshape(-1)[::stride].sort()
    values = weight.detach().reshape(-1)[::stride][order]
    falls = values.diff() <= 0
    is_tie = sums.diff() == 0  # (what these weights are among each other says nothing)
    is_varied = (values.diff() != 0).sum() >= FEWEST // 4
    return bool((falls | is_tie).all() & is_varied)
