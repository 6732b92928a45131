"""The probe of clipping by norm: where the norm is finite, so are all gradients, and nobody need look at them again.

Where it is not and they are, clipping makes them 0 (without a limit, NaN).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from ampguard import compat
from ampguard.capture.cut_to_zero import CutToZero, about_to_be_cut
from ampguard.capture.frames import user_line
from ampguard.capture.patches import Patches
from ampguard.capture.probing.probe import Probe
from ampguard.capture.recorder import FlightRecorder


class ClippingProbe(Probe):
    """Tells the recorder which gradients `clip_grad_norm_` has found finite."""

    def __init__(self, recorder: FlightRecorder, patches: Patches) -> None:
        super().__init__(recorder, patches)
        self._measured: Any = None
        """What the norm of the running call was taken of."""
        self._norm = math.nan
        """That norm, where it lies on the CPU."""
        self._asked: tuple[Any, Any, FrameType] | None = None
        """The limit of the running call, the order of its norm, and who called."""
        self._cut: CutToZero | None = None
        """The last gradients that were found to be made 0 by clipping."""

    def install(self) -> None:
        place = compat.total_norm_function()
        if place is None:
            return
        self._patches.replace(*place, self._watch_norm)
        for owner in (clip_grad, torch.nn.utils):
            self._patches.replace(owner, "clip_grad_norm_", self._watch_clipping)

    def _watch_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            norm = original(tensors, *args, **kwargs)
            if self._asked is not None and type(tensors) is list:
                self._measured = tensors
                self._recorder.barrier.call(self._was_measured, tensors, norm)
            return norm

        return get_total_norm

    def _watch_clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        @functools.wraps(original)
        def clip_grad_norm_(parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any) -> Any:
            if not recorder.active or recorder.paused or torch.compiler.is_compiling():
                return original(parameters, max_norm, norm_type, *args, **kwargs)
            self._asked, self._norm = (max_norm, norm_type, sys._getframe(1)), math.nan
            began = recorder.log.next_index
            try:
                norm = original(parameters, max_norm, norm_type, *args, **kwargs)
            finally:
                self._asked = None
                measured, self._measured = self._measured, None
                recorder.gradients.remade.clipped = range(began, recorder.log.next_index)
            # Whatever is at most 1 leaves finite gradients finite; PyTorch cuts the factor off there, but not a NaN.
            if measured is not None and self._norm < math.inf:
                recorder.barrier.call(recorder.gradients.found_finite, measured)
            return norm

        return clip_grad_norm_

    def _was_measured(self, gradients: list[Tensor], norm: Any) -> None:
        if self._asked is None or not (type(norm) is Tensor and norm.is_cpu and compat.has_values(norm)):
            return
        limit, order, frame = self._asked
        if not (float(order) > 0.0 and float(limit) >= 0.0):
            return
        recorder = self._recorder
        before, recorder.paused = recorder.paused, True  # the tape is not to take our look for the script's doing
        try:
            self._norm = norm.item()
            if self._norm == math.inf:
                line = user_line(frame)
                cut = about_to_be_cut(gradients, norm.dtype, float(limit), float(order), line, self._cut)
                recorder.gradients.cut = cut
                self._cut = cut or self._cut
        finally:
            recorder.paused = before
