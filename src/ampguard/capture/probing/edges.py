"""The probes of what lies between steps: batches that are fetched, and regions that the tape may not reach across."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ampguard import compat
from ampguard.capture.patches import Patches
from ampguard.capture.recorder import FlightRecorder


class EdgeProbe:
    """Tells the recorder of batches, and takes its tape off where inference mode begins or ends."""

    def __init__(self, recorder: FlightRecorder, patches: Patches) -> None:
        self._recorder = recorder
        self._patches = patches

    def install(self) -> None:
        self._watch_loaders()
        self._watch_inference_mode()

    def _watch_loaders(self) -> None:
        recorder = self._recorder
        guarded = recorder.barrier.call

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __next__(self: Any) -> Any:  # noqa: N807
                if recorder.paused or not recorder.active:
                    return original(self)
                guarded(recorder.tape.leave)
                recorder.paused = True
                try:
                    batch = original(self)
                finally:
                    recorder.paused = False
                guarded(recorder.note_batch, batch)
                return batch

            return __next__

        for iterator in compat.loader_iterators():
            self._patches.replace(iterator, "__next__", watch)

    def _watch_inference_mode(self) -> None:
        recorder = self._recorder
        guarded = recorder.barrier.call

        def off_tape(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def cross(self: Any, *args: Any) -> Any:
                if recorder.active and not recorder.paused:
                    guarded(recorder.tape.leave)
                return original(self, *args)

            return cross

        for edge in ("__enter__", "__exit__"):
            self._patches.replace(torch.inference_mode, edge, off_tape)
