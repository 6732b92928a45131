"""bfloat16 autocast over float32 weights; float32's range, so no loss scale."""

from __future__ import annotations

import torch

from ampguard.engine.precision.base import Precision


class Bf16(Precision):
    """Matrix products in bfloat16, weights and updates in float32."""

    name = "bf16"
    autocast_dtype = torch.bfloat16
