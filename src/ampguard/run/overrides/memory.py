"""The most memory that this process has held."""

from __future__ import annotations

import sys

import torch

from ampguard import compat

MIB = 2**20


def peak_memory_mib() -> dict[str, float]:
    """`host`: resident memory, libraries included. `device`: what PyTorch's allocator gave out, where CUDA is in use."""
    peaks: dict[str, float] = {}
    try:
        import resource  # not on Windows

        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peaks["host"] = round(largest / (MIB if sys.platform == "darwin" else 1024), 1)
    except ImportError:
        pass
    if compat.cuda_is_in_use():
        devices = range(torch.cuda.device_count())
        peaks["device"] = round(max(torch.cuda.max_memory_allocated(i) for i in devices) / MIB, 1)
    return peaks
