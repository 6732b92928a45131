"""float8 matrix products through torchao, around bfloat16 autocast; refused where the device cannot do them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine.precision.base import Precision
from ampguard.errors import PrecisionError

FIRST_WITH_FLOAT8 = (8, 9)
"""CUDA's compute capability of Ada."""
MULTIPLE = 16
"""Both sides of a weight must be multiples of this for a float8 matrix product."""


class Float8(Precision):
    """Linear layers with dynamically scaled float8 inputs and weights; everything else as in bf16."""

    name = "float8"
    autocast_dtype = torch.bfloat16

    def refuse_if_unsupported(self, models: Sequence[nn.Module]) -> None:
        why = self._what_is_missing()
        if why is not None:
            raise PrecisionError(f"float8 cannot be used here: {why}\n  do    use bf16, which needs neither")

    def _what_is_missing(self) -> str | None:
        if self.device_type != "cuda" or not torch.cuda.is_available():
            return f"it needs an NVIDIA GPU of compute capability 8.9 or newer, the model is on {self.device_type!r}"
        capability = torch.cuda.get_device_capability()
        if capability < FIRST_WITH_FLOAT8:
            return f"this GPU has compute capability {capability[0]}.{capability[1]}, float8 needs 8.9 or newer"
        if importlib.util.find_spec("torchao") is None:
            return "the package torchao is not installed (pip install torchao)"
        return None

    def convert(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], in_fp32: Sequence[nn.Module]
    ) -> None:
        convert = importlib.import_module("torchao.float8").convert_to_float8_training
        kept = {id(inner) for module in in_fp32 for inner in compat.all_modules(module)}

        def fits(module: nn.Module, name: str) -> bool:
            if id(module) in kept or not isinstance(module, nn.Linear):
                return False
            return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0

        for model in models:
            convert(model, module_filter_fn=fits)
