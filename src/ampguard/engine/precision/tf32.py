"""float32 whose matrix products may round their inputs to TensorFloat-32 (10 bits of mantissa), where the device can."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ampguard.engine.precision.base import Precision

FIRST_WITH_TF32 = (8, 0)
"""CUDA's compute capability of Ampere."""


class Tf32(Precision):
    """The setting holds in forward and backward passes only, and is put back after them."""

    name = "tf32"

    def refuse_if_unsupported(self, models: Sequence[nn.Module]) -> None:
        if self.device_type == "cuda" and torch.cuda.get_device_capability() >= FIRST_WITH_TF32:
            return
        self.notes.append(f"this {self.device_type} device has no TensorFloat-32: tf32 is float32 here")

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.device_type == "cuda" else before)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
