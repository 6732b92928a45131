"""A number over all of a state, by which it is seen whether it was altered."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_MODULUS = 1 << 61


def seal_of(state: Any) -> int:
    """Changes with any element of any tensor, any plain value and any key. One pass over the memory."""
    total = 0
    for path, leaf in leaves(state):
        total = (total * 31 + zlib.crc32(f"{path}:{_told(leaf)}".encode())) % _MODULUS
        if isinstance(leaf, Tensor):
            total = (total * 31 + _bits(leaf)) % _MODULUS
    return total


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no container, with its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{i}" if path else str(i))
    else:
        yield path, value


def _told(leaf: Any) -> str:
    """What can be compared across processes: the text of an object with an address cannot."""
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)}:{leaf.dtype}"
    return repr(leaf) if isinstance(leaf, (str, int, float, bool, bytes, complex, type(None))) else type(leaf).__name__


@torch.no_grad()
def _bits(tensor: Tensor) -> int:
    """Sum of the tensor's memory, read as integers."""
    if tensor.numel() == 0:
        return 0
    dense = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
    flat = dense.contiguous().view(-1)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size(), torch.uint8)
    return int(flat.view(kind).sum(dtype=torch.int64))
