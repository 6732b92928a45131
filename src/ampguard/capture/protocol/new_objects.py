"""Gradients that a script reads leave objects behind: noticed at once, at the price of two questions a step.

PyTorch makes the Python object of a gradient when somebody first asks for it, and keeps it as long as the gradient. So
Python's count of new objects, between a backward pass and the division by the scale, tells that gradients were read of
which nothing else tells (a logger, a histogram). It says no more than that: what they were read for a close look shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ampguard.capture.protocol.routine import MAX_CALLS

STEADY = 16
"""Iterations in a row with the same count, without which it says nothing: others make objects at that place as well."""

MAX_CHANGES = 4
"""Times that the usual count is another before it has been steady; more, and the place is given up."""

MAX_KINDS = 3
"""Different counts at a place that were steady once, after which it is given up."""

COLLECTED = -100
"""Objects that are fewer by more: Python has collected garbage in between, and counts anew."""

UNKNOWN = COLLECTED - 1
"""No count yet."""

MAX_TRIES = 3
"""Times that an iteration is looked at because of one count."""


@dataclass(slots=True)
class _Count:
    """A count that was not the usual one: since which iteration, when it last came, how often it was followed."""

    first: int
    last: int
    tries: int = 0


@dataclass(slots=True)
class _Place:
    """A place of an iteration: since when its count is the usual one, how often that has changed, and other counts."""

    since: int
    changes: int = 0
    others: dict[int, _Count] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Expected:
    """When an unusual count is expected again (after how many steps of the optimizer), and since which iteration it has come."""

    steps: int
    first: int


class NewObjects:
    """Counts them."""

    def __init__(self) -> None:
        self.began = 0
        """Python's count at the end of the last backward pass."""
        self.usual: list[int | None] = [UNKNOWN] * (MAX_CALLS + 1)
        """More objects than then, at each place of an iteration; None for a place that is given up."""
        self._places: dict[int, _Place] = {}

    def unusual(self, at: int, left: int, steps: int, iteration: int) -> Expected | None:
        """How to go on after a count that was not usual. `steps`: of the optimizer so far. None: nothing to do.

        A count that is new may be there in the next iteration as well; one that comes now and then is expected after as many
        steps as lay between.
        """
        place = self._places.setdefault(at, _Place(steps))
        if left < COLLECTED:
            return None
        if not place.others and steps - place.since < STEADY:
            place.since, place.changes = steps, place.changes + 1
            self.usual[at] = left if place.changes <= MAX_CHANGES else None
            return None
        known = place.others.get(left)
        if known is None:
            place.others[left] = _Count(iteration, steps)
            if len(place.others) <= MAX_KINDS:
                return Expected(steps + 1, iteration)
            self.usual[at] = None
            return None
        period, known.last = steps - known.last, steps
        known.tries += 1
        return Expected(steps + period, known.first) if period > 0 and known.tries < MAX_TRIES else None
