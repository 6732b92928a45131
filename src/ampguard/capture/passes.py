"""Counting the iterations of a loop without an optimizer, by its backward passes.

Each is one, until it shows that several places of the script differentiate in turn: two losses one after the other, the
inner steps of a meta-learner and the outer one. Then the place that was last in a turn ends an iteration.
"""

from __future__ import annotations

LONGEST_TURN = 16
"""Backward passes of one iteration; of more, each counts."""


class Passes:
    """Counts iterations; what was counted is put right when it shows what an iteration is."""

    def __init__(self) -> None:
        self.count = 0
        self._turn: set[object] = set()
        """The places that have differentiated in the running turn."""
        self._in_turn = 0
        """How often they have."""
        self._last: object = None
        self._closing: object = None
        """The place that ends an iteration; as long as no turn was seen, none."""
        self._longest = 0
        self._taken_back = 0
        """What was taken off the count, until a second turn has ended as the first did."""

    def ended(self, place: object) -> bool:
        """A backward pass has ended. True where that ends an iteration."""
        has_ended = self._ends_turn(place) if self._closing is not None else self._is_one_more(place)
        self._last = place
        return has_ended

    def _is_one_more(self, place: object) -> bool:
        if place != self._last and place in self._turn:
            extra = self._in_turn - 1
            self._turn = {place}
            self._longest, self._in_turn = self._in_turn, 1
            if extra < LONGEST_TURN:
                self._closing, self._taken_back = self._last, extra
                self.count -= extra
                return False
            self.count += 1
            return True
        self._turn.add(place)
        self._in_turn += 1
        self.count += 1
        return True

    def _ends_turn(self, place: object) -> bool:
        self._in_turn += 1
        if place == self._closing:
            self._longest, self._in_turn = max(self._longest, self._in_turn), 0
            self._taken_back = 0
            self.count += 1
            return True
        if self._in_turn > 2 * self._longest:  # that place comes no more: each of these was an iteration
            self.count += self._in_turn + self._taken_back
            self._closing, self._taken_back = None, 0
            self._turn, self._in_turn = {place}, 1
            return True
        return False
