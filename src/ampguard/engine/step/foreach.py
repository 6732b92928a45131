"""One call for all tensors instead of one for each, where an optimizer left that open and the tensors are small.

On an accelerator PyTorch chooses so by itself. On the CPU it never does; there it pays while a model of many small
tensors stays in the cache: a large one is better updated tensor by tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard.compat import is_of_pytorch

SMALL, ALL = 4096, 1 << 18
"""Mean and total elements of parameters up to which one call for all was faster (RMSprop, NAdam, Adamax; 2 MiB of L2)."""


@contextlib.contextmanager
def as_foreach(optimizer: Optimizer) -> Iterator[None]:
    """Let the next `optimizer.step()` take its foreach implementation where that is sure to be right and fast."""
    groups = [g for g in optimizer.param_groups if _would_gain(g)] if is_of_pytorch(type(optimizer)) else []
    for group in groups:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in groups:
            group["foreach"] = None


def _would_gain(group: dict[str, Any]) -> bool:
    """Not where the script chose, nor with numbers in tensors: `foreach` takes those only on an accelerator."""
    if group.get("foreach", False) is not None or group.get("fused") or group.get("differentiable"):
        return False
    if group.get("capturable") or any(isinstance(value, Tensor) for value in group.values()):
        return False
    with_gradient = [p for p in group["params"] if p.grad is not None]
    if len(with_gradient) < 2 or sum(p.numel() for p in with_gradient) > min(ALL, SMALL * len(with_gradient)):
        return False
    return all(_is_plain(p) and _is_plain(p.grad) for p in with_gradient)


def _is_plain(tensor: Tensor | None) -> bool:
    return (
        tensor is not None
        and type(tensor) in (Tensor, nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
    )
