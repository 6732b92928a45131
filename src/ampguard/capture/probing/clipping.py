"""The probe of clipping by norm: where the norm is finite, so are all gradients, and nobody need look at them again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from ampguard import compat
from ampguard.capture.patches import Patches
from ampguard.capture.probing.probe import Probe
from ampguard.capture.recorder import FlightRecorder


class ClippingProbe(Probe):
    """Tells the recorder which gradients `clip_grad_norm_` has found finite."""

    def __init__(self, recorder: FlightRecorder, patches: Patches) -> None:
        super().__init__(recorder, patches)
        self._is_clipping = False
        self._measured: Any = None
        """What the norm of the running call was taken of."""

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
            if self._is_clipping:
                self._measured = tensors
            return original(tensors, *args, **kwargs)

        return get_total_norm

    def _watch_clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        @functools.wraps(original)
        def clip_grad_norm_(parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any) -> Any:
            if not recorder.active or recorder.paused or torch.compiler.is_compiling():
                return original(parameters, max_norm, norm_type, *args, **kwargs)
            self._is_clipping = True
            began = recorder.log.next_index
            try:
                norm = original(parameters, max_norm, norm_type, *args, **kwargs)
            finally:
                self._is_clipping = False
                measured, self._measured = self._measured, None
                recorder.gradients.remade.clipped = range(began, recorder.log.next_index)
            if type(measured) is list:
                recorder.barrier.call(self._clipped, measured, norm, max_norm, norm_type)
            return norm

        return clip_grad_norm_

    def _clipped(self, gradients: list[Tensor], norm: Any, max_norm: Any, norm_type: Any) -> None:
        is_here = type(norm) is Tensor and norm.is_cpu and compat.has_values(norm)
        # Whatever is at most 1 leaves finite gradients finite; PyTorch cuts the factor off there, but not a NaN.
        if is_here and float(norm_type) > 0.0 and float(max_norm) >= 0.0 and norm.item() < float("inf"):
            self._recorder.gradients.found_finite(gradients)
