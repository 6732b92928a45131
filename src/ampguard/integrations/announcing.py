"""Agreeing with whoever has wrapped GradScaler on whether losses are scaled."""

from __future__ import annotations

import torch

from ampguard import compat


def scalers_may_scale() -> bool:
    """Whether a GradScaler made now would be on: `ampguard run --precision bf16` makes them all be off."""
    return not compat.scaler_is_watched() or torch.amp.GradScaler("cpu").is_enabled()
