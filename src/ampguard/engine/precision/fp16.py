"""float16 autocast with a dynamic loss scale, over float32 weights. Also called O1."""

from __future__ import annotations

import torch

from ampguard.engine.precision.base import Precision


class Fp16(Precision):
    """Matrix products in float16, weights and updates in float32."""

    name = "fp16"
    autocast_dtype = torch.float16
    scales_loss = True
    takes_closures = False
