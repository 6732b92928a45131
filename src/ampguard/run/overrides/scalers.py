"""Gradient scalers: enabled where the precision asks for loss scaling, disabled where it does not."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ampguard import compat
from ampguard.capture.patches import Patches
from ampguard.run.overrides.ledger import Ledger
from ampguard.run.overrides.plan import Plan


class Scalers:
    """`GradScaler`, by whatever constructor: all of them call one `__init__`."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan = plan
        self._ledger = ledger
        self.scales = False
        """Whether the script scales its losses itself."""
        self.stepping = 0
        """How many of the script's enabled scalers are in their `step`."""
        self.has_stepped = False
        """Set by whoever sees the optimizer's own step run inside a scaler's."""
        self._switched_off: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        """Scalers that the script wanted on, and the state that they would have begun with."""
        self._switched_on: weakref.WeakSet[Any] = weakref.WeakSet()
        """Scalers that the script wanted off: its weights may be float16, whose gradients GradScaler refuses."""
        self.on_attempt: Callable[[], None] | None = None
        self.on_skipped: Callable[[Any, float, bool], None] | None = None
        self.lowered: Callable[[Any], float | None] | None = None
        """What the scale of a scaler that was updated is to be instead."""
        self._lower_next: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        """The scale with which a scaler begins its next iteration."""

    def install(self, patches: Patches) -> None:
        kind = compat.GRAD_SCALER
        patches.replace(kind, "__init__", self._watch_init)
        patches.replace(kind, "scale", self._watch_scale)
        patches.replace(kind, "step", self._watch_step)
        patches.replace(kind, "update", self._watch_update)
        patches.replace(kind, compat.UNSCALES, self._watch_unscaling)
        patches.replace(kind, "state_dict", self._watch_state)
        patches.replace(kind, "load_state_dict", self._watch_load)

    def _watch_init(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(scaler: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:  # noqa: N807
            if self._plan.is_set:
                wanted = first_state(*args, **kwargs)
                if not self._plan.scales_loss:
                    self._switched_off[scaler] = wanted
                elif not wanted:
                    self._switched_on.add(scaler)
                if isinstance(scaler, compat.BorrowedScaler) and not self._plan.scales_loss:
                    self._ledger.failed(
                        "the loss scale of ampguard.Amp stays on: it is the engine's own, and divided again"
                    )
                elif self._plan.scales_loss is not bool(wanted):
                    self._ledger.done(f"switched {'off' if wanted else 'on'} the script's {type(scaler).__name__}")
                args, kwargs = args[:4], {**kwargs, "enabled": self._plan.scales_loss}
                if self._plan.scales_loss and device == "cuda" and not torch.cuda.is_available():
                    device = "cpu"
                    self._ledger.done("a GradScaler for CUDA was made one for the CPU")
            original(scaler, device, *args, **kwargs)

        return __init__

    def _watch_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            lower = self._lower_next.pop(scaler, None)
            value = compat.loss_scale(scaler)
            if lower is not None and value is not None:
                value.fill_(lower)
            self.scales = self.scales or scaler.is_enabled()
            return original(scaler, outputs)

        return scale

    def _watch_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            if self.on_attempt is not None:
                self.on_attempt()
            self.stepping += 1
            self.has_stepped = False
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                self.stepping -= 1
            # An optimizer that is none of PyTorch's steps unseen.
            self.has_stepped = self.has_stepped or compat.let_step_unseen(scaler, optimizer)
            if self.on_skipped is not None:
                self.on_skipped(optimizer, scaler.get_scale(), not self.has_stepped)
            return result

        return step

    def _watch_update(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def update(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            lower = self.lowered(scaler) if self.lowered is not None and scaler.is_enabled() else None
            if lower is not None:  # not now: loops take a scale that has fallen for a step that was skipped
                self._lower_next[scaler] = lower

        return update

    def _watch_unscaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def unscale(scaler: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
            return original(scaler, optimizer, inv_scale, found_inf, allow_fp16 or scaler in self._switched_on)

        return unscale

    def _watch_state(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A scaler that is off has no state. A script whose scaler is always on may read it, for its log say (Swin)."""

        @functools.wraps(original)
        def state_dict(scaler: Any) -> dict[str, Any]:
            state: dict[str, Any] = original(scaler)
            return state or dict(self._switched_off.get(scaler, {}))

        return state_dict

    def _watch_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A checkpoint of a run in another precision holds no state of a scaler: this one begins anew."""

        @functools.wraps(original)
        def load_state_dict(scaler: Any, state_dict: dict[str, Any]) -> None:
            if self._plan.is_set and scaler.is_enabled() and not state_dict:
                self._ledger.done("the checkpoint holds no loss scale: it begins anew")
                return
            original(scaler, state_dict)

        return load_state_dict


def first_state(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> dict[str, Any]:
    """The state of a new GradScaler with these arguments; empty for one that the script itself has off."""
    if not enabled:
        return {}
    return {
        "scale": init_scale,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
        "_growth_tracker": 0,
    }
