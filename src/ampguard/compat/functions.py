"""How custom autograd functions are applied: by a class method in Python, and since 2.15 by one in C."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinMethodType, MethodType
from typing import Any

import torch


def apply_of(attribute: Any) -> Callable[..., Any] | None:
    """`Function.apply`, as its class holds it, as a function of the class and the arguments; None for what we do not know."""
    if isinstance(attribute, classmethod):
        return attribute.__func__
    if not _is_in_c(attribute):
        return None

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return attribute.__get__(None, cls)(*args, **kwargs)

    return apply


def is_bound_apply(value: Any) -> bool:
    """Whether this is PyTorch's `apply` bound to some function: `scale_gradient = ScaleGradient.apply`."""
    apply = torch.autograd.Function.__dict__.get("apply")
    if isinstance(apply, classmethod):
        return type(value) is MethodType and value.__func__ is apply.__func__
    if type(value) is not BuiltinMethodType or value.__name__ != "apply" or not _is_in_c(apply):
        return False
    owner = value.__self__
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def bound_type() -> type:
    """The type of what `is_bound_apply` finds."""
    return BuiltinMethodType if _is_in_c(torch.autograd.Function.__dict__.get("apply")) else MethodType


def _is_in_c(attribute: Any) -> bool:
    return type(attribute) is type(dict.__dict__["fromkeys"])
