"""The random streams of a process, as plain values."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ampguard import compat


def rng_state() -> dict[str, Any]:
    """PyTorch's streams on every device in use, Python's, and NumPy's where it is imported."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    if compat.cuda_is_in_use():
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [
            str(name),
            [int(key) for key in keys],
            *[float(x) if i == 2 else int(x) for i, x in enumerate(rest)],
        ]
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Go on with the streams of `rng_state`; streams of devices that this machine lacks are left out."""
    torch.set_rng_state(state["torch"].cpu())
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([stream.cpu() for stream in state["cuda"]])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype="uint32"), *rest))
