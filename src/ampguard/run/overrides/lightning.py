"""Lightning: its float32 plugin opens no autocast region around `training_step`; here it gains one.

`16-mixed` and `bf16-mixed` go through `torch.autocast` and `GradScaler` and are overridden there. The `-true`
precisions convert the model itself, which is said where its low-precision weights are seen.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from ampguard.capture.patches import Patches
from ampguard.engine.casting import cast_floats
from ampguard.run.late import AfterImport
from ampguard.run.overrides.ledger import Ledger
from ampguard.run.overrides.plan import Plan
from ampguard.run.overrides.regions import Regions

FABRIC = ("lightning.fabric.plugins.precision.amp", "lightning_fabric.plugins.precision.amp")
"""Where Fabric's `MixedPrecision` is defined: it casts the inputs of a model before its autocast region."""

PLUGINS = ("lightning.fabric.plugins.precision.precision", "lightning_fabric.plugins.precision.precision")
"""Where `Precision.forward_context` is defined, under the names of both distributions."""


class LightningPlugins:
    """The base plugin of Lightning and Fabric, as soon as it is imported."""

    def __init__(self, plan: Plan, regions: Regions, ledger: Ledger) -> None:
        self._plan = plan
        self._regions = regions
        self._ledger = ledger
        self._waiting: list[AfterImport] = []

    def install(self, patches: Patches) -> None:
        for name in (*PLUGINS, *FABRIC):
            known = sys.modules.get(name)
            if known is not None:
                self._patch(patches, known)
                continue
            waiting = AfterImport(name, functools.partial(self._imported, patches, name))
            waiting.install()
            self._waiting.append(waiting)

    def undo(self) -> None:
        for waiting in self._waiting:
            waiting.uninstall()

    def _imported(self, patches: Patches, name: str) -> None:
        self._patch(patches, sys.modules[name])

    def _patch(self, patches: Patches, module: ModuleType) -> None:
        plugin = getattr(module, "Precision", None) if module.__name__ in PLUGINS else None
        if plugin is not None and "forward_context" in vars(plugin):
            patches.replace(plugin, "forward_context", self._watch)
        mixed = getattr(module, "MixedPrecision", None)
        if mixed is not None and "convert_input" in vars(mixed):
            patches.replace(mixed, "convert_input", self._watch_inputs)

    def _watch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        @contextlib.contextmanager
        def forward_context(plugin: Any) -> Iterator[None]:
            device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
            dtype = self._plan.dtype
            with contextlib.ExitStack() as stack:
                stack.enter_context(original(plugin))
                if dtype is not None and not torch.is_autocast_enabled(device):
                    stack.enter_context(self._regions.lent(device, dtype))
                    self._ledger.done("autocast around Lightning's steps")
                yield

        return forward_context

    def _watch_inputs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def convert_input(plugin: Any, data: Any) -> Any:
            if not self._plan.is_set:
                return original(plugin, data)
            return cast_floats(data, self._plan.low_dtype or self._plan.dtype or torch.float32)

        return convert_input
