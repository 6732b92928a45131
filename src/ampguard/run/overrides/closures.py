"""Optimizers whose `step` is given a closure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import LBFGS, Optimizer


def without_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Callable[[], Any] | None, Any, Any]:
    """(the closure, the other arguments) of a call of `step`."""
    if args and callable(args[0]):
        return args[0], args[1:], kwargs
    if callable(kwargs.get("closure")):
        return kwargs["closure"], args, {k: v for k, v in kwargs.items() if k != "closure"}
    return None, args, kwargs


def calls_closure_once(optimizer: Optimizer) -> bool:
    """Whether `step(closure)` is `closure()` and then `step()`: PyTorch's own, but LBFGS, which searches along a line."""
    if isinstance(optimizer, LBFGS) or not type(optimizer).__module__.startswith("torch.optim"):
        return False
    return inspect.signature(type(optimizer).step).parameters["closure"].default is None
