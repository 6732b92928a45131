"""The probes of what lies between steps: batches that are fetched, and regions that the tape may not reach across."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import torch

from ampguard import compat
from ampguard.capture.probing.probe import Probe

_NOT_FINITE = ("tensor(nan", "tensor(inf", "tensor(-inf")


class EdgeProbe(Probe):
    """Tells the recorder of batches, and takes its tape off while inference mode begins or ends."""

    def install(self) -> None:
        self._watch_loaders()
        self._watch_inference_mode()
        self._watch_printing()
        self._watch_conversions()

    def _watch_loaders(self) -> None:
        recorder = self._recorder
        guarded = recorder.barrier.call

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __next__(self: Any) -> Any:  # noqa: N807
                if recorder.paused or not recorder.active:
                    return original(self)
                left = recorder.tape.left if recorder.tape.is_on_stack else 0
                guarded(recorder.tape.leave)
                recorder.paused = True
                try:
                    batch = original(self)
                except StopIteration:
                    recorder.paused = False
                    if left:  # what was added up over the batches is read behind them
                        guarded(recorder.tape.enter, left)
                    raise
                finally:
                    recorder.paused = False
                guarded(recorder.preprocessing.note_batch, batch, self)
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
                if not recorder.active or recorder.paused:
                    return original(self, *args)
                left = recorder.tape.left if recorder.tape.is_on_stack else 0
                guarded(recorder.tape.leave)
                try:
                    return original(self, *args)
                finally:
                    if left:  # what was computed on one side of it is read on the other
                        guarded(recorder.tape.enter, left)

            return cross

        for edge in ("__enter__", "__exit__"):
            self._patches.replace(torch.inference_mode, edge, off_tape)

    def _watch_printing(self) -> None:
        """A number that is printed as a tensor is read as one that is read by `item()`: PyTorch does it out of our sight."""
        watching, read, look = self._is_watching, self._read_printed, self._look_at_array
        guarded = self._recorder.barrier.call

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __repr__(self: Any, **kwargs: Any) -> Any:  # noqa: N807
                text = original(self, **kwargs)
                if type(self) is torch.Tensor and ("nan" in text or "inf" in text) and watching():
                    if text.startswith(_NOT_FINITE):
                        guarded(read, self)
                    else:
                        look(self)
                return text

            return __repr__

        self._patches.replace(torch.Tensor, "__repr__", watch)

    def _watch_conversions(self) -> None:
        """What NumPy or a list is given is read too; where it is more than a single number, NaN may well be meant (`nanmean`)."""
        recorder, watching, look = self._recorder, self._is_watching, self._look_at_array
        guarded = recorder.barrier.call

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def convert(self: Any, *args: Any, **kwargs: Any) -> Any:
                value = original(self, *args, **kwargs)
                if watching() and type(self) is torch.Tensor:
                    if _is_bad_number(value):
                        guarded(recorder.judge.read, self, math.nan)
                    elif type(value) is list or getattr(value, "ndim", False):
                        look(self)
                return value

            return convert

        for name in ("numpy", "tolist"):
            self._patches.replace(torch.Tensor, name, watch)

    def _read_printed(self, number: torch.Tensor) -> None:
        if number.is_cpu:
            self._recorder.judge.read(number, math.nan)
        else:
            self._look_at_array(number)

    def _look_at_array(self, array: torch.Tensor) -> None:
        recorder = self._recorder
        recorder.paused = True  # the tape is not to take our look for the script's doing
        try:
            recorder.barrier.call(recorder.judge.read_array, array)
        finally:
            recorder.paused = False

    def _is_watching(self) -> bool:
        """Whether what this thread reads now is the script's, and of interest."""
        recorder = self._recorder
        return recorder.active and not recorder.paused and recorder.turns.thread == threading.get_ident()


def _is_bad_number(value: Any) -> bool:
    """Whether it is a NaN or an Inf, or an array of no dimensions that holds one."""
    if type(value) is not float:
        if getattr(value, "ndim", 1) != 0 or value.dtype.kind != "f":
            return False
        value = value.item()
    return not math.isfinite(value)
