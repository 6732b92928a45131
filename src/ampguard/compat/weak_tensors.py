"""Weak references to the script's tensors, and the one function of PyTorch that refuses tensors which have any."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef


class OwnRef(WeakIdRef):
    """A key of our own dictionaries."""

    __slots__ = ()


def by_tensor() -> WeakIdKeyDictionary:
    """A dictionary by tensor that keeps none alive."""
    return WeakIdKeyDictionary(ref_type=OwnRef)


def unhindered(swap_tensors: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.utils.swap_tensors` that does not see our weak references: it refuses tensors with any.

    A swap leaves each tensor its identity, so that ours stay right. One without a callback is taken for ours (Python
    gives all who ask the same object); those of dictionaries and of compiled code, which have one, still hinder it.
    """
    code = getattr(swap_tensors, "__code__", None)
    if code is None or "getweakrefs" not in code.co_names:
        return swap_tensors
    seen = types.SimpleNamespace(getweakrefs=_of_others)
    blind = types.FunctionType(
        code,
        {**swap_tensors.__globals__, "weakref": seen},
        swap_tensors.__name__,
        swap_tensors.__defaults__,
        swap_tensors.__closure__,
    )
    blind.__kwdefaults__ = swap_tensors.__kwdefaults__
    return blind


def _of_others(tensor: Any) -> list[weakref.ref[Any]]:
    found = weakref.getweakrefs(tensor)
    return [ref for ref in found if not isinstance(ref, OwnRef) and ref.__callback__ is not None]
