"""The operations of the self-test, each a function of operands that are given in the precision under test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Operation = Callable[[Sequence[Tensor]], Tensor]
Operands = Callable[[torch.Generator], list[Tensor]]


def _normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def _matmul(x: Sequence[Tensor]) -> Tensor:
    return x[0] @ x[1]


def _convolution(x: Sequence[Tensor]) -> Tensor:
    return F.conv2d(x[0], x[1], padding=1)


def _attention(x: Sequence[Tensor]) -> Tensor:
    return F.scaled_dot_product_attention(x[0], x[1], x[2], is_causal=True)


def _softmax(x: Sequence[Tensor]) -> Tensor:
    return torch.softmax(x[0], dim=-1)


OPERATIONS: dict[str, tuple[Operation, Operands]] = {
    # Long sums, of 1024 products: where they are kept in low precision the error shows it.
    "matmul": (_matmul, lambda g: [_normal(g, 128, 1024), _normal(g, 1024, 128, scale=1 / 32)]),
    "convolution": (_convolution, lambda g: [_normal(g, 4, 64, 16, 16), _normal(g, 64, 64, 3, 3, scale=1 / 24)]),
    "attention": (_attention, lambda g: [_normal(g, 2, 4, 128, 64) for _ in range(3)]),
    "softmax": (_softmax, lambda g: [_normal(g, 256, 512, scale=4.0)]),
}
"""name -> (the operation, its operands in float64)."""


def sums_are_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product whose partial sums pass the largest number of `dtype`, and whose sum does not, is finite.

    64 products of half the largest number each, then as many negative ones: the sum is 0. Raises where the device
    has no such product.
    """
    root = math.sqrt(torch.finfo(dtype).max) * 0.7
    signs = torch.ones(1, 128, dtype=torch.float64)
    signs[:, 64:] = -1
    row = (signs * root).to(dtype).to(device)
    column = torch.full((128, 1), root, dtype=torch.float64).to(dtype).to(device)
    return bool(torch.isfinite(row @ column).all())


def keeps_subnormals(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether numbers below the smallest normal one survive a multiplication by 1."""
    tiny = torch.full((64,), torch.finfo(dtype).smallest_normal / 4, dtype=torch.float64).to(dtype).to(device)
    return bool((tiny * torch.ones_like(tiny) != 0).all())
