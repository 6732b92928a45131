"""Autocast's cache of weight casts, as the step used it.

Within one region autocast casts a float32 leaf once, and all calls share the result: the gradients of the calls are
added up in the low precision before they pass the cast. A replay that casts anew for each call adds them in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from ampguard import compat, numerics
from ampguard.capture.events.autocasting import is_in_region
from ampguard.capture.record import Event, Modes, RootCall
from ampguard.replay.trace import Trace

NO_REGION = -1


class WeightCasts:
    """The cache during one replay: on where the step had it on, emptied where the step left a region.

    The cache is the process's own. While the script is inside a region of its own, its casts lie there: then the replay
    leaves the cache alone and casts anew each time.
    """

    def __init__(self) -> None:
        self._is_ours = not is_in_region()
        self._region = NO_REGION

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """A replay; after it the cache is empty, as the script left it."""
        try:
            yield
        finally:
            self._leave_region()

    @contextlib.contextmanager
    def of_call(self, root: RootCall) -> Iterator[None]:
        """A root call runs, in its region."""
        if root.region != self._region:
            self._leave_region()
            self._region = root.region
        with self._inside(root.modes, is_cached=root.region != NO_REGION):
            yield

    @contextlib.contextmanager
    def of_backward(self, modes: Modes) -> Iterator[None]:
        """A backward pass runs: as a rule behind the region, where nothing is cached any more."""
        if modes.autocast_dtype is None:
            self._leave_region()
        with self._inside(modes, is_cached=True):
            yield

    def differ(self, trace: Trace, events: Iterable[Event]) -> bool:
        """Whether the replay cast a weight twice that the step cast once: their gradients met in another precision."""
        if self._is_ours:
            return False
        roots = [event for event in events if isinstance(event, RootCall) and event.region != NO_REGION]
        regions = {root.index: root.region for root in roots}
        weights = {
            compat.storage_key(p) for root in roots for p in compat.all_parameters(root.module) if p.requires_grad
        }
        casts = [
            (regions[op.event], op.inputs[0].storage)
            for op in trace.ops
            if op.short_name == "_to_copy" and op.event in regions and op.inputs[0].storage in weights
        ]
        return len(casts) != len(set(casts))

    def _leave_region(self) -> None:
        if self._is_ours:
            torch.clear_autocast_cache()
        self._region = NO_REGION

    @contextlib.contextmanager
    def _inside(self, modes: Modes, is_cached: bool) -> Iterator[None]:
        """Let a region that the event itself opens end as an inner one, where the event ran inside another."""
        if not (self._is_ours and is_cached):
            yield
            return
        before = torch.is_autocast_cache_enabled()
        is_nested = modes.autocast_dtype is not None
        torch.set_autocast_cache_enabled(True)
        if is_nested:
            torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if is_nested:
                torch.autocast_decrement_nesting()
            torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def autocast_in(dtype: torch.dtype | None) -> Iterator[None]:
    """Let every autocast region cast to `dtype`, where that is a low precision (autocast refuses a mixture of two)."""
    if dtype is None or not numerics.is_low_precision(dtype):
        yield
        return
    original, wanted = torch.set_autocast_dtype, dtype

    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        original(device_type, wanted if numerics.is_low_precision(dtype) else dtype)

    torch.set_autocast_dtype = set_autocast_dtype
    try:
        yield
    finally:
        torch.set_autocast_dtype = original
