"""What ranks tell each other of their weights: the sums of their bits (`numerics.bit_sum`), sent as float32, or one word."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

PART = 1 << 24


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
