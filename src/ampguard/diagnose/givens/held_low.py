"""Weights that are finite where they are trained, and not in a dictionary of the script's that holds them in a low precision.

An average of weights, say, or a checkpoint, that was cast to float16.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.numerics import is_finite, is_low_precision, largest


@dataclass(frozen=True, slots=True)
class HeldLow:
    """`key`: under which the dictionary holds the same values in `dtype`. `wider`: what another one holds there in float32 or
    wider, finite and beyond the range of `dtype` at each of the bad places; None where there is none."""

    key: str
    dtype: torch.dtype
    wider: Tensor | None

    @property
    def reaches(self) -> float | None:
        return float(self.wider.abs().max()) if self.wider is not None else None


def held_low(values: Tensor) -> HeldLow | None:
    """What low-precision tensor of the script's has these values, the bad ones included; None where none has.

    Looks through the dictionaries of the process: for incidents only.
    """
    if is_low_precision(values.dtype) or is_finite(values):
        return None
    low = next(((key, t) for key, t in _held(values) if _is_cast(values, t)), None)
    if low is None:
        return None
    key, held = low
    bad = ~values.isfinite()
    limit = largest(held.dtype)
    wide = (t for known, t in _held(values) if known == key and not is_low_precision(t.dtype) and is_finite(t))
    wider = next((t for t in wide if bool((t[bad].abs() > limit).all())), None)
    return HeldLow(key, held.dtype, wider)


def _held(like: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors of that shape and place in dictionaries, each with its key."""
    for thing in gc.get_objects():
        if issubclass(type(thing), dict):  # `isinstance` would ask lazy proxies, which may warn
            for key, value in list(dict.items(thing)):
                if type(key) is str and type(value) in (Tensor, nn.Parameter) and _is_like(value, like):
                    yield key, value.detach()


def _is_like(tensor: Tensor, like: Tensor) -> bool:
    is_plain = tensor.shape == like.shape and tensor.device == like.device and tensor.layout == torch.strided
    return is_plain and tensor.is_floating_point() and compat.has_values(tensor)


def _is_cast(values: Tensor, low: Tensor) -> bool:
    """Whether nothing was lost on the way from `low` to `values`, as in `low.float()`."""
    return is_low_precision(low.dtype) and bool(
        torch.isclose(low.to(values.dtype), values, rtol=0, atol=0, equal_nan=True).all()
    )
