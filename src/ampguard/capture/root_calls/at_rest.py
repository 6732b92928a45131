"""Buffers that no call of a module has changed yet, with their values: a codebook is written in its tenth call first.

Writes are known by the version counters, which a write through `.data` leaves as they are. Small buffers are therefore
compared with what they held, before a call and behind it, in as many calls as cost next to nothing.
"""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.record import SavedBuffer
from ampguard.numerics import is_finite

MOST = 1 << 20
"""Elements of the buffers of a module of which the values are kept."""

MOST_COMPARED = 1 << 16
"""Elements of those that are compared."""

MOST_BUFFERS = 8
"""How many are compared."""

SHARE = 0.002
"""Share of the time since the first comparison that comparing may take."""

FREE_SECONDS = 0.05
"""What comparing may take of a run beside that."""

Key = tuple[int, str]


def key_of(buffer: SavedBuffer) -> Key:
    """By which a buffer is known: where it hangs, and its name."""
    return id(buffer.owner), buffer.name


class RestingBuffers:
    """Those of one module."""

    def __init__(self) -> None:
        self._kept: dict[Key, SavedBuffer] = {}
        self._elements = 0
        self._compared: list[Tensor] | None = None
        self._values: list[Tensor] = []
        """What the compared ones held."""

    def keep(self, buffer: SavedBuffer) -> None:
        """A call has left it as it was; its value was copied before."""
        known = self._kept.get(key_of(buffer))
        if known is not None and known.copy is buffer.copy:
            return
        self._elements += buffer.tensor.numel() if known is None else 0
        if self._elements <= MOST:
            self._kept[key_of(buffer)] = dataclasses.replace(buffer)
            self._compared = None

    def take(self, buffer: SavedBuffer) -> None:
        """Give what a call has changed for the first time the value that it had before, where that was kept."""
        known = self._kept.pop(key_of(buffer), None) if self._kept else None
        if known is not None:
            self._compared = None
            if known.tensor is buffer.tensor and known.version == buffer.version:
                buffer.copy = known.copy if buffer.copy is None else buffer.copy

    @property
    def are_any(self) -> bool:
        """Whether there is anything to compare."""
        if self._compared is None:
            self._choose()
        return bool(self._compared)

    def _choose(self) -> None:
        left = MOST_COMPARED
        self._compared, self._values = [], []
        for buffer in self._kept.values():
            tensor, copy = buffer.tensor, buffer.copy
            is_chosen = copy is not None and _is_comparable(tensor) and tensor.numel() <= left and is_finite(copy)
            if copy is not None and is_chosen and len(self._compared) < MOST_BUFFERS:
                left -= tensor.numel()
                self._compared.append(tensor)
                self._values.append(copy)

    def written_unseen(self) -> set[Key]:
        """Those that hold something else than they did."""
        if not self._compared or all(map(torch.equal, self._compared, self._values)):
            return set()
        pairs = zip(self._compared, self._values, strict=True)
        changed = {id(tensor) for tensor, value in pairs if not torch.equal(tensor, value)}
        return {key for key, buffer in self._kept.items() if id(buffer.tensor) in changed}


def _is_comparable(tensor: Tensor) -> bool:
    is_plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return is_plain and tensor.numel() > 0 and compat.is_dense(tensor)


class Looks:
    """Says whether a comparison can be paid for."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._spent = 0.0
        self._asked = 0.0

    def begin(self) -> bool:
        """Whether to compare now; `end` is told when that is done."""
        self._asked = now = time.perf_counter()
        if self._began is None:
            self._began = now
        return self._spent <= FREE_SECONDS + SHARE * (now - self._began)

    def begin_again(self) -> None:
        """The second half, behind the call."""
        self._asked = time.perf_counter()

    def end(self) -> None:
        """It is done."""
        self._spent += time.perf_counter() - self._asked
