"""SHA-256 of everything a training leaves behind, by part, so that a difference says where it is."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def arguments() -> argparse.Namespace:
    """Where the digests go, and how many steps to train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("digests", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    return parser.parse_args()


def seed_all(seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def save_digests(
    path: Path,
    losses: list[float],
    models: Iterable[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    parts: dict[str, Any] = {
        "losses": losses,
        "parameters": [dict(model.named_parameters()) for model in models],
        "gradients": [{name: p.grad for name, p in model.named_parameters()} for model in models],
        "buffers": [dict(model.named_buffers()) for model in models],
        "modes": [[module.training for module in model.modules()] for model in models],
        "optimizer": [optimizer.state_dict() for optimizer in optimizers],
        "scaler": scaler.state_dict() if scaler else None,
        "torch RNG": torch.get_rng_state(),
        "python RNG": random.getstate(),
        "numpy RNG": np.random.get_state(),
    }
    path.write_text(json.dumps({part: _sha256(value) for part, value in parts.items()}))


def _sha256(value: object) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(value):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(value: object) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    elif isinstance(value, np.ndarray):
        yield value.tobytes()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _chunks(item)
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}]".encode()
        for item in value:
            yield from _chunks(item)
    else:
        yield repr(value).encode()
