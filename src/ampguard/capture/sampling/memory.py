"""How much memory is left, without asking anybody to wait."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def available_bytes(like: Sequence[Tensor]) -> int | None:
    """Bytes left where these tensors live, or on the host if that is less. None where it is not known."""
    left = [host_bytes()]
    for device in {t.device for t in like if t.is_cuda}:
        left.append(torch.cuda.mem_get_info(device)[0])
    known = [value for value in left if value is not None]
    return min(known) if known else None


def peak_bytes(like: Sequence[Tensor]) -> int | None:
    """The most bytes that were in use where these tensors live, on the first of several; None on the host."""
    device = next((t.device for t in like if t.is_cuda), None)
    return torch.cuda.max_memory_allocated(device) if device is not None else None


def host_bytes() -> int | None:
    """Bytes of host memory left, within the limit of the container."""
    known = [value for value in (_of_machine(), *_of_containers()) if value is not None]
    return min(known) if known else None


def _of_machine() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _of_containers() -> list[int]:
    left = []
    for limit, used in CGROUPS:
        with contextlib.suppress(OSError, ValueError):
            left.append(max(0, int(limit.read_text()) - int(used.read_text())))
    return left
