"""A number over all of a state, by which it is seen whether it was altered."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ampguard.numerics import bit_sum

_MODULUS = 1 << 61


def seal_of(state: Any) -> int:
    """Changes with any element of any tensor, any plain value, any key and any empty container. One pass over the memory."""
    return _seal_of(leaves(state, with_empty=True))


def is_sealed(state: Any, seal: Any) -> bool:
    """Whether this is the state's seal. That of earlier versions saw no empty container."""
    return bool(seal == seal_of(state) or seal == _seal_of(leaves(state)))


def _seal_of(state: Iterator[tuple[str, Any]]) -> int:
    total = 0
    for path, leaf in state:
        total = (total * 31 + zlib.crc32(f"{path}:{told(leaf)}".encode())) % _MODULUS
        if isinstance(leaf, Tensor):
            dense = leaf.detach().coalesce().values() if leaf.is_sparse else leaf
            total = (total * 31 + int(bit_sum(dense))) % _MODULUS
    return total


def leaves(value: Any, path: str = "", with_empty: bool = False) -> Iterator[tuple[str, Any]]:
    """Every value that is no container, with its path. `with_empty`: containers that hold nothing, too."""
    if with_empty and isinstance(value, (Mapping, list, tuple)) and not value:
        yield path, "{}" if isinstance(value, Mapping) else "[]"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key), with_empty)
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{i}" if path else str(i), with_empty)
    else:
        yield path, value


def told(leaf: Any) -> str:
    """What can be compared across processes: the text of an object with an address cannot."""
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)}:{leaf.dtype}"
    return repr(leaf) if isinstance(leaf, (str, int, float, bool, bytes, complex, type(None))) else type(leaf).__name__
