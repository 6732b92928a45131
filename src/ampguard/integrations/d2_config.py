"""Which precision a detectron2 or FastReID config asks for."""

from __future__ import annotations

from typing import Any

import torch

from ampguard.errors import SetupError

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
"""What `ampguard.precision` calls the types that a trainer can compute in."""


def name_of(dtype: torch.dtype) -> str:
    """Raises SetupError for another type."""
    if dtype not in NAMES:
        raise SetupError(f"precision={dtype}: AMPTrainer takes {', '.join(map(str, NAMES))}")
    return NAMES[dtype]


def dtype_of(cfg: Any) -> torch.dtype:
    """float32 unless `SOLVER.AMP.ENABLED` (lazy configs: `train.amp.enabled`); else `SOLVER.AMP.PRECISION`, or float16."""
    try:
        amp = cfg.SOLVER.AMP if hasattr(cfg, "SOLVER") else cfg.train.amp
        is_enabled = amp.ENABLED if hasattr(amp, "ENABLED") else amp.enabled
    except AttributeError as error:
        raise SetupError(
            f"the config says nothing of mixed precision: {error}\n"
            "  do    give it SOLVER.AMP.ENABLED (lazy configs: train.amp.enabled), or say precision=torch.float16"
        ) from error
    if isinstance(is_enabled, str):
        raise SetupError(
            f"SOLVER.AMP.ENABLED is the text {is_enabled!r}, neither True nor False (train.amp.enabled in a lazy config)\n"
            "  do    write it without quotes"
        )
    if not is_enabled:
        return torch.float32
    name = str(getattr(amp, "PRECISION", None) or getattr(amp, "precision", None) or "float16")
    for dtype in NAMES:
        if str(dtype) == f"torch.{name.removeprefix('torch.')}":
            return dtype
    raise SetupError(f"SOLVER.AMP.PRECISION is {name!r}: AMPTrainer takes float16, bfloat16 or float32")
