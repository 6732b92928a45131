"""A number over all of a state, by which it is seen whether it was altered."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ampguard.numerics import bit_sum

_MODULUS = 1 << 61


def seal_of(state: Any) -> int:
    """Changes with any element of any tensor, any plain value and any key. One pass over the memory."""
    total = 0
    for path, leaf in leaves(state):
        total = (total * 31 + zlib.crc32(f"{path}:{told(leaf)}".encode())) % _MODULUS
        if isinstance(leaf, Tensor):
            dense = leaf.detach().coalesce().values() if leaf.is_sparse else leaf
            total = (total * 31 + int(bit_sum(dense))) % _MODULUS
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


def told(leaf: Any) -> str:
    """What can be compared across processes: the text of an object with an address cannot."""
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)}:{leaf.dtype}"
    return repr(leaf) if isinstance(leaf, (str, int, float, bool, bytes, complex, type(None))) else type(leaf).__name__
