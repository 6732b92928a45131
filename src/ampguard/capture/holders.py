"""Which events were given a tensor that no event made."""

from __future__ import annotations

from torch import Tensor

from ampguard.capture.record import Event, Held, held_in


class Holders:
    """Finds them without walking through all events at every question: a script may fill a tensor row by row."""

    def __init__(self) -> None:
        self._by_tensor: dict[int, list[Held]] = {}
        self._seen = 0
        """Events that were looked into."""

    def of(self, tensor: Tensor, events: list[Event]) -> list[Held]:
        """What the events hold this tensor as. Between two calls of `clear` events may only be added."""
        for event in events[self._seen :]:
            for held in held_in((event.args, event.kwargs)):
                self._by_tensor.setdefault(id(held.tensor), []).append(held)
        self._seen = len(events)
        return self._by_tensor.get(id(tensor), [])

    def clear(self) -> None:
        """Events were dropped, or put in each other's place."""
        self._by_tensor.clear()
        self._seen = 0
