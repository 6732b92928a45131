"""The probe of `nn.Module.load_state_dict`: who gave the weights their values."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ampguard.capture.frames import user_line
from ampguard.capture.loaded import versions
from ampguard.capture.probing.probe import Probe


class LoadingProbe(Probe):
    """Tells the recorder of loaded weights."""

    def install(self) -> None:
        self._patches.replace(nn.Module, "load_state_dict", self._watch)

    def _watch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder
        guarded = recorder.barrier.call

        @functools.wraps(original)
        def load_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not recorder.active or recorder.paused or torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            before = guarded(versions, module)
            result = original(module, *args, **kwargs)
            if before is not None:
                guarded(recorder.loaded.note, module, before, user_line(sys._getframe(1)))
            return result

        return load_state_dict
