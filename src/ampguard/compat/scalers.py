"""GradScalers that a loop uses beside the engine: which there are, and what they have done."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ampguard.compat.updates import GRAD_SCALER, BorrowedScaler, loss_scale

Scaler = torch.amp.GradScaler

Explain = Callable[[str, object | None], Exception | None]
"""Given the name of a call and the optimizer that it was given, if any."""

_moments = itertools.count(1)
_began: weakref.WeakKeyDictionary[Scaler, int] = weakref.WeakKeyDictionary()
"""When each scaler has scaled for the first time, of those that began while they were followed."""


class AskingScaler(torch.amp.GradScaler):
    """GradScaler, which asks `before_unscale` before it reads an optimizer's gradients. It may raise."""

    @staticmethod
    def before_unscale(optimizer: torch.optim.Optimizer) -> None:
        """To be overridden."""

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self.before_unscale(optimizer)
        return super()._unscale_grads_(optimizer, *args, **kwargs)


def follow_scalers(explain_unused: Explain) -> int:
    """Notice from now on which GradScalers begin to scale. Returns the present moment, for `scalers_since`.

    One that never scaled raises what `explain_unused` gives for the call, if anything. The two methods of
    GradScaler's that are replaced, once and for good, are those that it calls at its first use and where it refuses.
    """
    _replace("_lazy_init_scale_growth_tracker", _noting)
    _replace("_check_scale_growth_tracker", functools.partial(_explaining, explain_unused))
    return next(_moments)


def _replace(name: str, make: Callable[[Any], Any]) -> None:
    method = getattr(GRAD_SCALER, name, None)
    if method is not None and not hasattr(method, "__wrapped__"):
        setattr(GRAD_SCALER, name, functools.wraps(method)(make(method)))


def _noting(begin: Callable[..., Any]) -> Callable[..., Any]:
    def noted(self: Scaler, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, BorrowedScaler):
            _began[self] = next(_moments)
        return begin(self, *args, **kwargs)

    return noted


def _explaining(explain: Explain, check: Callable[..., Any]) -> Callable[..., Any]:
    def explained(self: Scaler, call: str) -> Any:
        try:
            return check(self, call)
        except AssertionError as error:
            optimizer = sys._getframe(1).f_locals.get("optimizer")  # the method's that asks for the check
            better = None if isinstance(self, BorrowedScaler) else explain(call, optimizer)
            if better is None:
                raise
            raise better from error

    return explained


def scalers_since(moment: int) -> list[Scaler]:
    """Those that have begun to scale after it."""
    return [scaler for scaler, began in _began.items() if began > moment]


def scaler_with(scales: list[torch.Tensor]) -> Scaler | None:
    """The GradScaler, but for our own, whose scale is one of these tensors.

    Goes through all objects that Python keeps track of: some 20 ms in a large process.
    """
    kinds = _with_subclasses(GRAD_SCALER) - {BorrowedScaler}
    places = {scale.data_ptr() for scale in scales}
    scalers: list[Scaler] = [thing for thing in gc.get_objects() if type(thing) in kinds]
    for scaler in scalers:
        own = loss_scale(scaler)
        if own is not None and own.data_ptr() in places:
            return scaler
    return None


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def has_divided(scaler: Scaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the scaler has divided this optimizer's gradients since its last update."""
    states = getattr(scaler, "_per_optimizer_states", {})
    stage = states[id(optimizer)].get("stage") if id(optimizer) in states else None
    return getattr(stage, "name", "READY") != "READY"


def is_at_initial_scale(scaler: Scaler) -> bool:
    """Whether the scale is the one that a new scaler of this kind would begin with. Waits for the device."""
    scale = loss_scale(scaler)
    return scale is not None and float(scale) == getattr(scaler, "_init_scale", None)


def has_been_updated(scaler: Scaler) -> bool:
    """Whether `update` was ever called, as far as the scale and its count of finite steps tell. Waits for the device."""
    count = getattr(scaler, "_growth_tracker", None)
    return not is_at_initial_scale(scaler) or (count is not None and bool(count))
