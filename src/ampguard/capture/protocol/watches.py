"""The optimizers and scalers of a run, found again by identity at the price of one dictionary lookup."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from operator import is_
from typing import Any

from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.loss_scale import DeviceScale
from ampguard.capture.record import Line


class ScalerWatch:
    """A scaler by its weak reference."""

    __slots__ = (
        "__weakref__",
        "created",
        "driver",
        "first_scale",
        "first_step",
        "is_enabled",
        "is_own",
        "loaded",
        "number",
        "ref",
        "scale",
        "state_asked",
        "steps",
        "used_at",
        "uses",
        "was_asked",
    )

    def __init__(self, scaler: Any, number: int, created: Line | None) -> None:
        self.ref = weakref.ref(scaler)
        self.number = number
        self.created = created
        self.driver: str | None = None
        """The framework whose code scales the losses with it; None: the script's own, or not known."""
        self.is_enabled = bool(scaler.is_enabled())
        self.is_own = is_own_scaler(scaler)
        self.scale: DeviceScale | None = None
        self.first_scale: DeviceScale | None = None
        """As it was when the first loss was scaled."""
        self.first_step: int | None = None
        """The iteration in which that was."""
        self.used_at: Line | None = None
        """Where it was seen to scale a loss first."""
        self.uses = 0
        self.steps = 0
        self.was_asked = False
        """Its scale was read: without that, nobody divides by it on purpose."""
        self.state_asked = False
        """Its `state_dict()` was called: somebody saves it."""
        self.loaded = False

    @property
    def made_or_used_at(self) -> Line | None:
        """Where it is to be changed; one from before the guard is known by where it is used."""
        return self.created or self.used_at

    def current_scale(self) -> DeviceScale:
        """The scale until the next update."""
        if self.scale is None:
            self.scale = DeviceScale(self.ref(), self)
        return self.scale


class Watches:
    """Every live optimizer and scaler that was seen."""

    def __init__(self, on_gone: Callable[[Hashable], None]) -> None:
        self.optimizers: list[OptimizerWatch] = []
        self.scalers: list[ScalerWatch] = []
        self.by_id: dict[int, Any] = {}
        self._on_gone = on_gone
        self._made: dict[str, int] = {}

    def optimizer(self, optimizer: Optimizer, created: Line | None = None) -> OptimizerWatch:
        """The watch of an optimizer; a new one at first sight.

        A framework's wrapper (LightningOptimizer, AcceleratedOptimizer) is the optimizer whose groups it shows.
        """
        known = self.by_id.get(id(optimizer))
        if known is not None:
            return known  # type: ignore[no-any-return]
        groups = getattr(optimizer, "param_groups", None)
        for watch in self.optimizers:
            other = watch.ref()
            if other is not None and other.param_groups is groups:
                self._remember(optimizer, watch, is_alias=True)
                return watch
        number = self._made[type(optimizer).__name__] = self._made.get(type(optimizer).__name__, -1) + 1
        watch = OptimizerWatch(optimizer, number, created)
        self.optimizers.append(watch)
        self._remember(optimizer, watch)
        return watch

    @property
    def has_scaler(self) -> bool:
        """Whether losses may be scaled: perhaps gradients are taken before the first one is."""
        return any(watch.is_enabled for watch in self.scalers)

    def join_wrapped(self) -> None:
        """An optimizer inside another (SAM's, Lookahead's base) that shares its groups is one optimizer with it."""
        for later in self.optimizers[1:]:
            inner = later.ref()
            outer = next((w for w in self.optimizers if w is later or _shares_groups(w.ref(), inner)), later)
            if outer is later or inner is None:
                continue
            self.optimizers.remove(later)
            self._on_gone(later)
            outer.steps, outer.taken = max(outer.steps, later.steps), max(outer.taken, later.taken)
            self._remember(inner, outer, is_alias=True)

    def scaler(self, scaler: Any, created: Line | None = None) -> ScalerWatch:
        """The watch of a scaler; a new one at first sight."""
        known = self.by_id.get(id(scaler))
        if known is not None:
            return known  # type: ignore[no-any-return]
        watch = ScalerWatch(scaler, len(self.scalers), created)
        self.scalers.append(watch)
        self._remember(scaler, watch)
        return watch

    def _remember(self, subject: object, watch: Any, is_alias: bool = False) -> None:
        """By identity, for as long as the object lives."""
        identity = id(subject)
        self.by_id[identity] = watch

        def gone() -> None:
            if self.by_id.get(identity) is watch:
                del self.by_id[identity]
            if is_alias:
                return
            for kept in (self.optimizers, self.scalers):
                if watch in kept:
                    kept.remove(watch)
            self._on_gone(watch)

        weakref.finalize(subject, gone).atexit = False


def _shares_groups(one: Optimizer | None, other: Optimizer | None) -> bool:
    groups, others = getattr(one, "param_groups", None), getattr(other, "param_groups", None)
    if groups is None or others is None:
        return False
    return groups is others or (len(groups) == len(others) and all(map(is_, groups, others)))


def is_own_scaler(scaler: Any) -> bool:
    """Whether the scaler does as PyTorch's does: it overrides none of the methods that we watch, as FSDP's does.

    One that overrides `scale` alone and calls PyTorch's is found out when it does.
    """
    kind, base = type(scaler), compat.GRAD_SCALER
    return all(getattr(kind, name) is getattr(base, name) for name in ("scale", "unscale_", "step", "update"))


def only_scales_itself(scaler: Any) -> bool:
    """Whether `scale` is the only watched method that it overrides."""
    kind, base = type(scaler), compat.GRAD_SCALER
    return all(getattr(kind, name) is getattr(base, name) for name in ("unscale_", "step", "update"))
