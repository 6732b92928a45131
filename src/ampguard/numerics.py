"""Facts about floating-point types, and pure questions about tensors.

Nothing here changes a tensor or keeps one. Functions that return Python numbers wait for the device.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ampguard import compat

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})

NAN, POS_INF, NEG_INF = 1, 2, 3
"""Kinds of a non-finite value; 0 is finite."""

SMALL = 1 << 14
"""Elements up to which tensors are looked at together."""

PLAIN = (Tensor, torch.nn.Parameter)
"""Types whose values are where they say they are."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their bytes."""

KIND_NAMES = {NAN: "nan", POS_INF: "+inf", NEG_INF: "-inf"}


UNINITIALISED = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "empty_quantized"}
)
"""Operators whose result is whatever the memory held."""


def is_low_precision(dtype: torch.dtype | None) -> bool:
    """Whether `dtype` is a floating type narrower than float32.

    >>> is_low_precision(torch.bfloat16), is_low_precision(torch.float32), is_low_precision(torch.int8)
    (True, False, False)
    """
    return dtype is not None and dtype.is_floating_point and dtype.itemsize < 4


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """`torch.float16` -> "float16"."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def largest(dtype: torch.dtype) -> float:
    """The largest finite number of `dtype` (65504 for float16)."""
    return float(torch.finfo(dtype).max)


def fits(value: float, dtype: torch.dtype) -> bool:
    """Whether `value` stays finite when it is rounded to `dtype`.

    >>> fits(65519.0, torch.float16), fits(-1e9, torch.float16), fits(-1e9, torch.bfloat16)
    (True, False, True)
    """
    return math.isfinite(value) and bool(
        torch.isfinite(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype))
    )


def is_finite(tensor: Tensor) -> bool:
    """Whether every element (of a shard: every element here) is finite. Waits for the device; one pass over the memory.

    >>> is_finite(torch.ones(3)), is_finite(torch.tensor([1.0, float("nan")])), is_finite(torch.tensor([1, 2]))
    (True, False, True)
    """
    tensor = compat.local_part(tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()) or not compat.has_values(tensor):
        return True
    if not compat.is_dense(tensor):
        tensor = compat.stored_values(tensor)
    if tensor.is_complex():
        return is_finite(torch.view_as_real(tensor.detach().resolve_conj()))
    values = tensor.detach()
    if values.numel() == 1:
        return math.isfinite(values.item())
    if has_finite_sum(values):
        return True
    return bool(torch.isfinite(_computable(values)).all())  # the sum itself may have overflowed


def has_finite_sum(values: Tensor) -> bool:
    """Whether the sum of a dense, real tensor is finite, and so every element: what is not finite makes the sum so."""
    return values.dtype.itemsize >= 2 and math.isfinite(values.sum(dtype=max_sum_dtype(values)).item())


def cleaned(tensor: Tensor) -> Tensor:
    """A copy with 0 in place of everything that is not finite (in the stored values of a sparse tensor).

    >>> cleaned(torch.tensor([1.0, float("nan"), float("inf")]))
    tensor([1., 0., 0.])
    """
    clean = tensor.detach().clone()
    values = compat.elements_here(clean)
    values.copy_(torch.nan_to_num(_computable(values), nan=0.0, posinf=0.0, neginf=0.0))
    return clean


def _computable(values: Tensor) -> Tensor:
    """PyTorch stores float8 and computes nothing with it."""
    return values.float() if values.dtype.itemsize < 2 and values.is_floating_point() else values


def all_finite_on_cpu(tensors: Iterable[Tensor]) -> bool:
    """Whether those gradients or buffers that lie on the CPU are all finite; to look at others would mean to wait for them.

    Small ones are looked at together: one operator for many, at the price of a copy.
    """
    tensors = list(tensors)
    if not _are_plain(tensors):
        tensors = _values_on_cpu(tensors)
    sizes = list(map(Tensor.numel, tensors))
    if max(sizes, default=0) > SMALL:
        if not all(is_finite(tensor) for tensor, size in zip(tensors, sizes, strict=True) if size > SMALL):
            return False
        tensors = [tensor for tensor, size in zip(tensors, sizes, strict=True) if size <= SMALL]
    types = set(map(_dtype, tensors))
    groups = [tensors] if len(types) == 1 else [[t for t in tensors if t.dtype == dtype] for dtype in types]
    return all(is_finite(compat.flattened(together)) for together in groups)


_dtype, _is_cpu, _layout = map(operator.attrgetter, ("dtype", "is_cpu", "layout"))


def _are_plain(tensors: list[Tensor]) -> bool:
    """Whether all of these are ordinary tensors on the CPU; asked of many at once."""
    are_ordinary = _PLAIN_TYPES.issuperset(map(type, tensors)) and all(map(_is_cpu, tensors))
    return are_ordinary and _STRIDED.issuperset(map(_layout, tensors))


_PLAIN_TYPES = frozenset(PLAIN)
_STRIDED = frozenset({torch.strided})


def _values_on_cpu(tensors: list[Tensor]) -> list[Tensor]:
    """Of those that lie on the CPU the values, of sparse ones (a gradient is at times, but never nested) the stored ones."""
    found = [tensor if type(tensor) in PLAIN else compat.local_part(tensor) for tensor in tensors]
    found = [tensor for tensor in found if type(tensor) in PLAIN and tensor.is_cpu]  # others are fake
    return [tensor if tensor.layout is torch.strided else compat.stored_values(tensor) for tensor in found]


def doubles(tensor: Tensor) -> Tensor:
    """All numbers of a tensor in float64, flat; of complex ones both parts.

    >>> doubles(torch.tensor([1 + 2j])).tolist()
    [1.0, 2.0]
    """
    values = tensor.detach()
    return (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).double().flatten()


def max_sum_dtype(tensor: Tensor) -> torch.dtype:
    """The type to sum in so that large finite values seldom overflow."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def kinds(tensor: Tensor) -> Tensor:
    """The kind of each element as uint8, of the tensor's shape: 0 finite, NAN, POS_INF, NEG_INF."""
    values = tensor.detach()
    if values.is_complex():
        parts = kinds(torch.view_as_real(values.resolve_conj()))
        return torch.where((parts == NAN).any(-1), NAN, parts.amax(-1)).to(torch.uint8)
    values = _computable(values)
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    if not values.is_floating_point():
        return codes
    for kind, is_so in ((NAN, values != values), (POS_INF, values == math.inf), (NEG_INF, values == -math.inf)):
        codes.add_(is_so, alpha=kind)
    return codes


@dataclass(frozen=True, slots=True)
class TensorStats:
    """What a tensor's values look like. `min`, `max`, `max_abs` and `zero_share` are over the finite elements."""

    shape: tuple[int, ...]
    dtype: str
    min: float | None
    max: float | None
    max_abs: float | None
    finite_share: float
    nan: int
    pos_inf: int
    neg_inf: int
    zero_share: float

    def as_dict(self) -> dict[str, object]:
        """JSON-ready; drops what says nothing."""
        facts: dict[str, object] = {"shape": list(self.shape), "dtype": self.dtype, "min": self.min, "max": self.max}
        if self.finite_share < 1:
            facts["finite_share"] = round(self.finite_share, 6)
            facts |= {k: n for k, n in (("nan", self.nan), ("+inf", self.pos_inf), ("-inf", self.neg_inf)) if n}
        if self.zero_share:
            facts["zero_share"] = round(self.zero_share, 6)
        return facts


def stats(tensor: Tensor) -> TensorStats:
    """Statistics of any tensor, computed in float64 (integers and booleans too); of a sparse one those of its values."""
    values = tensor.detach()
    if not compat.is_dense(values):
        values = compat.stored_values(values)
    dtype = str(values.dtype).removeprefix("torch.")
    shape = tuple(values.shape)
    count = values.numel()
    if count == 0 or values.is_complex():
        return TensorStats(shape, dtype, None, None, None, 1.0, 0, 0, 0, 0.0)
    wide = values.to(torch.float64)
    finite = wide[torch.isfinite(wide)]
    share = finite.numel() / count
    if finite.numel() == 0:
        low = high = peak = None
        zeros = 0.0
    else:
        low, high = float(finite.min()), float(finite.max())
        peak = max(abs(low), abs(high))
        zeros = float((finite == 0).sum()) / count
    return TensorStats(
        shape,
        dtype,
        low,
        high,
        peak,
        share,
        int(torch.isnan(wide).sum()),
        int((wide == math.inf).sum()),
        int((wide == -math.inf).sum()),
        zeros,
    )


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and type hold the same, a NaN like the same NaN. Waits for the device.

    >>> has_same_bits(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]))
    True
    """
    one, other = compat.elements_here(one), compat.elements_here(other)
    if one.shape != other.shape:  # of sparse ones
        return False
    if one.is_complex():
        return has_same_bits(torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj()))
    if not one.is_floating_point():
        return torch.equal(one, other)
    bits = INTEGERS[one.dtype.itemsize]
    return torch.equal(one.view(bits), other.view(bits))


def bit_sum(tensor: Tensor) -> Tensor:
    """The sum of the elements' bits, read as integers: an int64 of no dimension on the tensor's device (modulo 2**64).

    Integer addition does not depend on the order, so the same bits give the same number on every device and with every
    number of threads, and one element that differs changes it. One pass over the memory, nothing copied.
    """
    values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    if not compat.has_values(values) or values.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    return values.view(INTEGERS[values.dtype.itemsize]).sum(dtype=torch.int64)
