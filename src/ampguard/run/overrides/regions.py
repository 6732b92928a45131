"""Autocast regions: those of the script get another dtype; where it has none, calls of its models get one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ampguard import compat
from ampguard.capture.patches import Patches
from ampguard.capture.root_calls.surroundings import current_modes
from ampguard.engine.casting import tensors_in
from ampguard.numerics import dtype_name, is_low_precision
from ampguard.run.overrides.ledger import Ledger
from ampguard.run.overrides.plan import Plan


class Regions:
    """Every `torch.autocast` made from now on, by whatever constructor: all of them call one `__init__`.

    A region that the script switches off stays off: inside an autocast region it is an island in float32.
    """

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan = plan
        self._ledger = ledger
        self._is_making = self._is_inside = False
        self.lent_on: str | None = None
        """Device type of the region of ours that a framework's whole step runs in."""
        self.of_script: set[str] = set()
        """Device types that the script opens regions for."""
        self.is_on_without_region = False
        """Whether the script switches autocast on by itself, which no region tells of."""

    def install(self, patches: Patches) -> None:
        patches.replace(torch.amp.autocast_mode.autocast, "__init__", self._watch)

    def _watch(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(  # noqa: N807
            region: Any,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            # In backward, checkpointing opens again what was open: that is overridden already, and no script's.
            may_be_script = enabled and self._plan.is_set and not self._is_making and not compat.in_backward()
            # DataParallel opens again what is open, and names no type.
            is_ambient = self._is_inside and dtype is None and torch.is_autocast_enabled(device_type)
            if may_be_script and not is_ambient:
                self.of_script.add(device_type)
                self._note(dtype or torch.get_autocast_dtype(device_type))
                enabled = self._plan.dtype is not None
                dtype = self._plan.dtype if enabled else dtype
            original(region, device_type, dtype, enabled, cache_enabled)

        return __init__

    def _note(self, dtype: torch.dtype) -> None:
        """For the report: what a region of the script is to be instead."""
        wanted = self._plan.dtype
        if wanted is None:
            self._ledger.done(f"switched off the script's autocast regions in {dtype_name(dtype)}")
        elif dtype != wanted:
            self._ledger.done(
                f"made the script's autocast regions {dtype_name(wanted)} in place of {dtype_name(dtype)}"
            )

    def make(self, device_type: str, dtype: torch.dtype | None) -> torch.autocast:
        """A region of ours; `dtype` None: one that switches autocast off."""
        before, self._is_making = self._is_making, True
        try:
            return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)
        finally:
            self._is_making = before

    @contextlib.contextmanager
    def around(self, region: torch.autocast) -> Iterator[None]:
        """Inside a region of ours: what PyTorch itself opens there (DataParallel) is not the script's."""
        before, self._is_inside = self._is_inside, True
        outer, is_other = current_modes().autocast_dtype, False
        try:
            with region:
                is_other = outer is not None and current_modes().autocast_dtype not in (None, outer)
                if is_other:  # autocast's cache of casts does not ask for their type
                    torch.clear_autocast_cache()
                yield
        finally:
            self._is_inside = before
            if is_other:
                torch.clear_autocast_cache()

    @contextlib.contextmanager
    def lent(self, device_type: str, dtype: torch.dtype) -> Iterator[None]:
        """A region of ours around what is more than a call of a model."""
        before, self.lent_on = self.lent_on, device_type
        try:
            with self.make(device_type, dtype):
                yield
        finally:
            self.lent_on = before

    def for_call(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[torch.autocast, bool] | None:
        """The region that a call outside every module needs, and whether it is gained; None where all is well."""
        if not self._plan.is_set:
            return None
        device, wanted = device_of(module, args, kwargs), self._plan.dtype
        if device is None or not torch.amp.is_autocast_available(device):
            return None
        own = own_low_dtype(module) if not self._plan.lifts_own_weights else None
        if own is not None and (own != wanted or device not in self.of_script):
            # in another type its weights and its activations would not go together
            return (self.make(device, own), False) if device in self.of_script else None
        if torch.is_autocast_enabled(device):
            is_right = wanted is not None and torch.get_autocast_dtype(device) == wanted
            if not is_right and self.lent_on is None and device not in self.of_script:
                self._say_no_region(torch.get_autocast_dtype(device), wanted)
            return None if is_right else (self.make(device, wanted), False)
        if wanted is None or device in self.of_script:
            return None
        return self.make(device, wanted), True

    def _say_no_region(self, dtype: torch.dtype, wanted: torch.dtype | None) -> None:
        self.is_on_without_region = True
        instead = dtype_name(wanted) if wanted is not None else "float32"
        self._ledger.failed(
            f"autocast in {dtype_name(dtype)} is on without a region of its own (torch.set_autocast_enabled): calls of modules "
            f"run in {instead}, what the script computes outside of them does not. Open it with torch.autocast"
        )


def any_low_dtype(module: nn.Module) -> torch.dtype | None:
    """The type of the first parameter in a low precision."""
    return next((p.dtype for p in compat.all_parameters(module) if is_low_precision(p.dtype)), None)


def own_low_dtype(module: nn.Module) -> torch.dtype | None:
    """The type of all floating parameters, where that is one low precision."""
    found: torch.dtype | None = None
    for parameter in compat.all_parameters(module):
        if parameter.is_floating_point():
            if not is_low_precision(parameter.dtype) or found not in (None, parameter.dtype):
                return None
            found = parameter.dtype
    return found


def device_of(module: nn.Module, args: Any, kwargs: Any) -> str | None:
    """Where a call computes: where the module's first parameter lies, else its first tensor."""
    first: torch.Tensor | None = next(iter(compat.all_parameters(module)), None)
    if first is None:
        first = next(tensors_in((args, kwargs)), None)
    return first.device.type if first is not None else None
