"""Which events were given a tensor that no event made."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.events.operands import held_by
from ampguard.capture.record import Event, Held


class Holders:
    """Finds them without walking through all events at every question: a script may fill a tensor row by row."""

    def __init__(self) -> None:
        self._by_tensor: dict[int, list[Held]] = {}
        self._by_memory: dict[int, list[Held]] = {}
        self._seen = 0
        """Events that were looked into."""
        self._seen_memory = 0
        self.have_seen = False
        """Whether there is anything to clear."""

    def of(self, tensor: Tensor, events: list[Event]) -> list[Held]:
        """What the events hold this tensor as. Between two calls of `clear` events may only be added."""
        self.have_seen = True
        for event in events[self._seen :]:
            for held in held_by(event):
                self._by_tensor.setdefault(id(held.tensor), []).append(held)
        self._seen = len(events)
        return self._by_tensor.get(id(tensor), [])

    def under_other_names(self, tensor: Tensor, events: list[Event]) -> Iterator[Held]:
        """What the events hold the whole of this tensor as without a copy, by another object: a weight and its `.data`.

        A version counter of its own says nothing of what is written through the other.
        """
        if not _is_plain(tensor):
            return
        self.have_seen = True
        for event in events[self._seen_memory :]:
            for held in held_by(event):
                if held.copy is None and _is_plain(held.tensor):
                    self._by_memory.setdefault(held.tensor.data_ptr(), []).append(held)
        self._seen_memory = len(events)
        for held in self._by_memory.get(tensor.data_ptr(), ()):
            if held.copy is None and held.tensor is not tensor and _are_laid_out_alike(held.tensor, tensor):
                yield held

    def clear(self) -> None:
        """Events were dropped, or put in each other's place."""
        if self.have_seen:
            self._by_tensor.clear()
            self._by_memory.clear()
            self._seen = self._seen_memory = 0
            self.have_seen = False


def _are_laid_out_alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()


def _is_plain(tensor: Tensor) -> bool:
    """Whether it has memory that can be asked for."""
    is_known = type(tensor) is Tensor or type(tensor) is nn.Parameter
    return is_known and compat.is_dense(tensor) and compat.has_values(tensor) and tensor.numel() > 0
