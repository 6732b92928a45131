"""The probe of `torch.utils.swap_tensors`, by which modules put converted weights in the place of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ampguard import compat
from ampguard.capture.probing.probe import Probe


class SwappingProbe(Probe):
    """Lets tensors be swapped to which only our weak references point: PyTorch would refuse, and end the training."""

    def install(self) -> None:
        if hasattr(torch.utils, "swap_tensors"):
            self._patches.replace(torch.utils, "swap_tensors", self._unhindered)

    @staticmethod
    def _unhindered(original: Callable[..., Any]) -> Callable[..., Any]:
        swap = compat.unhindered(original)

        @functools.wraps(original)
        def swap_tensors(t1: Any, t2: Any) -> Any:
            return swap(t1, t2)

        return swap_tensors
