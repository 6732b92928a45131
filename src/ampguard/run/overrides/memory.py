"""The most memory that this process has held for the script."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from ampguard import compat

MIB = 2**20
STATUS = Path("/proc/self/status")
MARKS = Path("/proc/self/clear_refs")
LOWER_MARK = "5"
"""What sets the high-water mark of a process back to what it holds (proc_pid_clear_refs(5))."""


class PeakMemory:
    """Looks at the system's high-water mark.

    What the guard's own investigations need is left out where the mark can be set back (Linux).
    """

    def __init__(self) -> None:
        self._before = 0.0

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What is held within does not count."""
        mark = _resident_mark()
        if mark is not None:
            self._before = max(self._before, mark)
        try:
            yield
        finally:
            if mark is not None:
                _give_back()
                with contextlib.suppress(OSError):
                    MARKS.write_text(LOWER_MARK)

    def mib(self) -> dict[str, float]:
        """`host`: resident memory, libraries included. `device`: what PyTorch's allocator gave out, where CUDA is in use."""
        peaks: dict[str, float] = {}
        host = _resident_mark() if self._before else _largest_resident()
        if host is not None:
            peaks["host"] = round(max(host, self._before), 1)
        if compat.cuda_is_in_use():
            devices = range(torch.cuda.device_count())
            peaks["device"] = round(max(torch.cuda.max_memory_allocated(i) for i in devices) / MIB, 1)
        return peaks


def _give_back() -> None:
    """Have the C library return what it holds and nobody uses (glibc's malloc_trim(3); others have none)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident_mark() -> float | None:
    """The high-water mark in MiB, where it can be set back."""
    try:
        lines = STATUS.read_text().splitlines() if MARKS.exists() else []
    except OSError:
        return None
    mark = next((line for line in lines if line.startswith("VmHWM:")), None)
    return int(mark.split()[1]) / 1024 if mark is not None else None


def _largest_resident() -> float | None:
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest / (MIB if sys.platform == "darwin" else 1024)
