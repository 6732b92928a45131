"""The dynamic loss scale, kept and updated on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampguard.compat import update_scale_
from ampguard.errors import UsageError

_FACTORS = ("scale", "growth_factor", "backoff_factor")
_COUNTS = ("growth_interval", "_growth_tracker")

MIN_SCALE = 2.0**-24
"""Below it a loss scale does not fall."""


class LossScale:
    """By what the loss is multiplied: less after Inf or NaN gradients, more after `growth_interval` finite steps.

    Grows and backs off as `torch.amp.GradScaler` does, but says nothing of optimizers, and does not fall below
    `min_scale`. `value` is one 0-d float32 tensor for life, so that a CUDA graph may hold it. Nothing waits for the
    device but `state_dict()` and `float(scale.value)`.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = MIN_SCALE,
    ) -> None:
        settings = {
            "scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "_growth_tracker": 0,
        }
        _refuse_bad(settings, "a loss scale")
        if not 0.0 < min_scale <= init_scale:
            raise UsageError(f"min_scale={min_scale:g} must be above 0 and not above init_scale={init_scale:g}.")
        self.growth_factor, self.backoff_factor = float(growth_factor), float(backoff_factor)
        self.growth_interval, self.min_scale = int(growth_interval), float(min_scale)
        self.value = torch.full((), float(init_scale), dtype=torch.float32, device=device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)

    def read(self) -> float:
        """`float(scale.value)`."""
        return float(self.value)

    def scale(self, outputs: Any) -> Any:
        """`outputs` times the scale: a tensor, or tensors in lists, tuples, dicts and iterables, on any device."""
        if isinstance(outputs, Tensor):
            return outputs * self.value.to(outputs.device, non_blocking=True)
        if isinstance(outputs, Mapping):
            return {key: self.scale(output) for key, output in outputs.items()}
        if isinstance(outputs, list | tuple):
            scaled = [self.scale(output) for output in outputs]
            return type(outputs)(*scaled) if hasattr(outputs, "_fields") else type(outputs)(scaled)
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
            return map(self.scale, outputs)
        raise UsageError(
            f"A loss must be a tensor, or a list, tuple or dict of tensors, to be scaled; got {type(outputs).__name__}."
        )

    @torch.no_grad()
    def update(self, found_infs: Sequence[Tensor]) -> None:
        """End an iteration: `found_infs` are the `found_inf` of every check since the last update, on any device."""
        if not found_infs:
            raise UsageError(
                "The loss scale cannot be updated: no gradients were checked since the last update. "
                "Call check_gradients() for every optimizer first, and pass each `found_inf`."
            )
        here = self.value.device
        found = [flag.to(here, torch.float32, non_blocking=True) for flag in found_infs]
        combined = found[0] if len(found) == 1 else torch.stack([flag.reshape(()) for flag in found]).amax()
        update_scale_(
            self.value, self._growth_tracker, combined, self.growth_factor, self.backoff_factor, self.growth_interval
        )
        self.value.clamp_(min=self.min_scale)

    def state_dict(self) -> dict[str, Any]:
        """The keys of `torch.amp.GradScaler.state_dict()`; waits for the device."""
        return {
            "scale": float(self.value),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self._growth_tracker),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()` of this class or of GradScaler. A bad one raises UsageError, and changes nothing."""
        _refuse_bad(state, "the saved state of a loss scale")
        self.growth_factor, self.backoff_factor = float(state["growth_factor"]), float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self.value.fill_(max(float(state["scale"]), self.min_scale))
        self._growth_tracker.fill_(int(state["_growth_tracker"]))


def _refuse_bad(state: Mapping[str, Any], what: str) -> None:
    """Raise UsageError naming what is missing or out of range."""
    missing = [key for key in (*_FACTORS, *_COUNTS) if key not in state]
    if missing and not state:
        raise UsageError(f"{what} is empty: it was saved by a GradScaler that was switched off (enabled=False).")
    if missing:
        raise UsageError(f"{what} lacks {', '.join(map(repr, missing))}; it holds {', '.join(map(repr, state))}.")
    for key in (*_FACTORS, *_COUNTS):
        number = state[key]
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise UsageError(f"{key}={number!r} of {what} is not a finite number.")
    if state["scale"] <= 0.0 or state["growth_factor"] < 1.0 or not 0.0 < state["backoff_factor"] < 1.0:
        raise UsageError(
            f"scale={state['scale']:g}, growth_factor={state['growth_factor']:g}, backoff_factor="
            f"{state['backoff_factor']:g} of {what}: the scale must be above 0, the growth factor 1 or more (1 keeps "
            "the scale from growing), and the backoff factor between 0 and 1."
        )
    if state["scale"] > torch.finfo(torch.float32).max:
        raise UsageError(f"scale={state['scale']:g} of {what} is beyond float32, in which it is kept.")
    if (
        any(state[key] != int(state[key]) for key in _COUNTS)
        or state["growth_interval"] < 1
        or state["_growth_tracker"] < 0
    ):
        raise UsageError(
            f"growth_interval={state['growth_interval']} and _growth_tracker={state['_growth_tracker']} of {what} must "
            "be whole numbers, at least 1 and 0."
        )
