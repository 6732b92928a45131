"""Gradients that a script reads leave objects behind: noticed at once, at the price of two questions a step.

PyTorch makes the Python object of a gradient when somebody first asks for it, and keeps it as long as the gradient. So
Python's count of new objects, between a backward pass and the division by the scale, tells that gradients were read of
which nothing else tells (a logger, a histogram). It says no more than that: what they were read for a close look shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from ampguard.capture.protocol.routine import MAX_CALLS

MAX_KINDS = 12
"""Different counts at one place of an iteration; more say that somebody else makes objects at the same time."""

COLLECTED = -100
"""Objects that are fewer by more: Python has collected garbage in between, and counts anew."""

MAX_TRIES = 3
"""Times that an iteration is looked at because of one count."""


@dataclass(slots=True)
class _Count:
    """A count that was not the usual one: since which iteration, when it last came, how often it was followed."""

    first: int
    last: int
    tries: int = 0


@dataclass(frozen=True, slots=True)
class Return:
    """An unusual count has come again: when it is expected next, and since which iteration it has come."""

    steps: int
    first: int


class NewObjects:
    """Counts them. The usual count of a place is the first that was seen there."""

    def __init__(self) -> None:
        self.began = 0
        """Python's count at the end of the last backward pass."""
        self.usual: list[int | None] = [None] * (MAX_CALLS + 1)
        """More objects than then, at each place of an iteration."""
        self._others: dict[int, dict[int, _Count]] = {}

    def unusual(self, place: int, left: int, steps: int, iteration: int) -> Return | None:
        """How to go on after a count that was not usual. `steps`: of the optimizer so far. None: nothing to do.

        A count that is new may be there in the next iteration as well (`steps` + 1); one that comes now and then is expected
        after as many steps as lay between.
        """
        if self.usual[place] is None:
            self.usual[place] = left
            return None
        others = self._others.setdefault(place, {})
        known = others.get(left)
        if left < COLLECTED or (known is None and len(others) >= MAX_KINDS):
            return None
        if known is None:
            others[left] = _Count(iteration, steps)
            return Return(steps + 1, iteration)
        period, known.last = steps - known.last, steps
        known.tries += 1
        return Return(steps + period, known.first) if known.tries < MAX_TRIES else None
