"""The probe of autocast's regions."""

from __future__ import annotations

import functools
import sys
from threading import get_ident
from typing import Any

import torch

from ampguard.capture.protocol.moves import Frame
from ampguard.capture.protocol.probing.witness import Call, Witness
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.root_calls.surroundings import AUTOCAST_DEVICES


class AutocastProbe:
    """Tells the habits of autocast's regions, and the recorder when the cache of casts is emptied."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness

    def install(self) -> None:
        replace = self._witness.patches.replace
        replace(torch.amp.autocast_mode.autocast, "__enter__", self._watch_enter)
        replace(torch, "clear_autocast_cache", self._watch_clear)

    def _watch_enter(self, original: Call) -> Call:
        witness = self._witness
        guarded, recorder, habits, window = witness.guarded, witness.recorder, witness.habits, witness.window
        training = witness.training

        @functools.wraps(original)
        def __enter__(region: Any) -> Any:  # noqa: N807
            if habits.region is None and recorder.active and training.ident in (0, get_ident()):
                habits.region = recorder.barrier.note(script_line, sys._getframe(1))
            if (habits.watches_regions or window.is_open) and recorder.active:
                guarded(self._entered, region, sys._getframe(1))
            return original(region)

        return __enter__

    def _entered(self, region: Any, frame: Frame) -> None:
        training = self._witness.training
        if torch.compiler.is_compiling() or (get_ident() != training.ident and not training.hears()):
            return
        self._witness.window.close()
        self._witness.habits.entered_autocast(region, frame)

    def _watch_clear(self, original: Call) -> Call:
        witness = self._witness
        guarded, recorder, habits, training = witness.guarded, witness.recorder, witness.habits, witness.training

        @functools.wraps(original)
        def clear_autocast_cache() -> None:
            original()
            recorder.regions += 1
            if not recorder.uses_autocast:  # (the region that ends is still in force)
                recorder.uses_autocast = any(torch.is_autocast_enabled(device) for device in AUTOCAST_DEVICES)
            is_ours = get_ident() == training.ident or guarded(training.hears)
            if is_ours:
                habits.region = None
            if is_ours and habits.watches_regions and not recorder.paused:
                guarded(habits.cache_cleared)

        return clear_autocast_cache
