"""A number for each tensor that tells two tensors apart: the sum of its bits, read as integers.

Integer addition does not depend on the order, so the same bits give the same number on every device and with every
number of threads, and one element that differs changes it. One pass over the memory, nothing copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ampguard import compat

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PART = 1 << 24


def bit_sum(tensor: Tensor) -> Tensor:
    """The sum of the elements' bits, an int64 of no dimension on the tensor's device (modulo 2**64)."""
    values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    if not compat.has_values(values) or values.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    return values.view(_INTEGERS[values.dtype.itemsize]).sum(dtype=torch.int64)


def as_parts(sums: Sequence[Tensor]) -> list[Tensor]:
    """Each sum as three numbers below 2**24, which float32 holds exactly."""
    return [part for s in sums for part in (s & (PART - 1), (s >> 24) & (PART - 1), (s >> 48) & 0xFFFF)]


def from_parts(parts: Sequence[float | None]) -> list[int]:
    """What `as_parts` took apart."""
    numbers = [int(part or 0) for part in parts]
    each = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    return [low + (middle << 24) + (high << 48) for low, middle, high in each]


def digest_of(sums: Sequence[int]) -> str:
    """One short word for all sums."""
    return hashlib.blake2b(b"".join(s.to_bytes(8, "little") for s in sums), digest_size=8).hexdigest()
