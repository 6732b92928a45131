"""Cast the floating tensors inside whatever a module takes or returns, and leave all else as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating tensor of another type cast to `dtype`; the containers are made anew.

    Complex and integer tensors, and float64 ones (somebody asked for them), stay what they are. What was one tensor is one
    afterwards: attention asks whether its query is its key.

    >>> cast_floats({"x": torch.ones(1, dtype=torch.float16), "n": 3}, torch.float32)
    {'x': tensor([1.]), 'n': 3}
    """
    done: list[tuple[Tensor, Tensor]] = []

    def cast(tensor: Tensor) -> Tensor:
        if not is_castable(tensor) or tensor.dtype == dtype:
            return tensor
        for before, after in done:
            if before is tensor:
                return after
        done.append((tensor, tensor.to(dtype)))
        return done[-1][1]

    return map_tensors(cast, value)


def is_castable(tensor: Tensor) -> bool:
    """Whether casting between the training precisions concerns this tensor."""
    return tensor.is_floating_point() and tensor.dtype in (torch.float16, torch.bfloat16, torch.float32)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The function on every tensor in lists, tuples, mappings and dataclasses."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return _like_mapping(value, {key: map_tensors(function, inner) for key, inner in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, inner) for inner in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, inner) for inner in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **{n: map_tensors(function, getattr(value, n)) for n in fields})
    return value


def _like_mapping(old: Mapping[Any, Any], new: dict[Any, Any]) -> Any:
    if type(old) is dict:
        return new
    if dataclasses.is_dataclass(old) and not isinstance(old, type):
        return type(old)(**new)  # transformers' ModelOutput is both
    try:
        return type(old)(new)  # type: ignore[call-arg]
    except TypeError:
        return new


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor that `map_tensors` would reach."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def lowest_dtype(value: Any) -> torch.dtype | None:
    """The narrowest training type among the tensors; None where there are none.

    Of float16 and bfloat16, whichever comes first.
    """
    dtypes = [t.dtype for t in tensors_in(value) if is_castable(t)]
    return min(dtypes, key=lambda dtype: dtype.itemsize, default=None)
