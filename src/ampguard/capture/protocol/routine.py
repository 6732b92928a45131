"""A healthy loop makes the same calls from the same places in every iteration: then the machine need not be asked.

An iteration that was fed to the machine in full and broke nothing becomes the routine. While calls come as it expects
them, they are only compared with it. The first that does not leaves the routine: what was left out of this iteration
is fed to the machine, which so knows all that it would have known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from ampguard.capture.protocol.watches import ScalerWatch
from ampguard.protocol.events import Backward, Clear, Event, Step, Unscale
from ampguard.protocol.machine import Machine

Key = tuple[Any, ...]
MAX_CALLS = 256


class Routine:
    """Expected calls, and how many of them have come."""

    def __init__(self, machine: Machine, guarded: Callable[..., Any]) -> None:
        self.is_on = False
        self._machine = machine
        self._guarded = guarded
        self._expected: list[tuple[Key, Event | None]] = []
        self.place = 0
        """How many of them."""
        self._held: set[Any] = set()
        """Optimizers that hold gradients of a scaled loss as an iteration begins, which it clears first."""
        self._repeats = False
        """Whether an iteration has come as expected."""
        self._noted: list[tuple[Key, Event | None]] = []
        self._is_plain = True

    # --- an iteration in full ---------------------------------------------------------------------------------------

    def note(self, key: Key, event: Event | None) -> None:
        """A call of the iteration that was told to the machine (or needed not to be)."""
        if len(self._noted) < MAX_CALLS:
            self._noted.append((key, event))

    def spoil(self) -> None:
        """This iteration is no routine."""
        self._is_plain = False
        if self.is_on:
            self.leave()

    def iteration_ended(self, may_rest: bool) -> None:
        """An update: from here on the same is expected again, if nothing was out of order."""
        noted, self._noted = self._noted, []
        machine = self._machine
        if may_rest and self._is_plain and len(noted) < MAX_CALLS and not steps_on_nothing(noted):
            held = {watch for watch in left_over(noted) if machine.stage(watch).is_open} if machine.open else set()
            if machine.is_at_rest(but_for=held):
                self._expected, self._held, self.place, self.is_on = noted, held, 0, True
                self._repeats = False
        self._is_plain = True

    # --- the routine ------------------------------------------------------------------------------------------------

    @property
    def is_before_backward(self) -> bool:
        """Whether no backward pass of this iteration has come yet: gradients may have been cleared."""
        return not any(type(event) is Backward for _, event in self._expected[: self.place])

    @property
    def divides_next(self) -> bool:
        """Whether the call that is expected now is a scaler's step that divides the gradients first."""
        event = self._expected[self.place][1]
        return type(event) is Step and event.unscales_with is not None

    def matches(self, key: Key) -> bool:
        """Whether this call is the one that is expected now; if not, the routine is over."""
        if self._expected[self.place][0] == key:
            self.place += 1
            if self.place == len(self._expected):
                self.place, self._repeats = 0, True
            return True
        self._guarded(self.leave)
        return False

    def expected_backward(self) -> Backward | None:
        """The backward pass that is expected now."""
        event = self._expected[self.place][1]
        return event if type(event) is Backward else None

    def leave(self) -> None:
        """Feed what was left out of this iteration."""
        self.is_on = False
        self._noted = self._expected[: self.place]
        self.place = 0
        if self._held and self._repeats:
            for watch in self._held - {event.optimizer for _, event in self._noted if type(event) is Clear}:
                self._hold(watch)
        for _, event in self._noted:
            if event is not None:
                self._machine.feed(_as_now(event))

    def _hold(self, watch: Any) -> None:
        """What it holds is of the last iteration, which the machine does not know."""
        passes = [event for _, event in self._expected if type(event) is Backward and watch in event.reached]
        now = _as_now(passes[-1]) if passes else None
        if isinstance(now, Backward) and now.scale is not None:
            self._machine.scaled_by(watch, now.scale)


def left_over(calls: Iterable[tuple[Key, Event | None]]) -> set[Any]:
    """The optimizers that these calls clear before a backward pass adds to them, and that get gradients once more behind their
    own step: a critic, of the generator's loss."""
    cleared: set[Any] = set()
    reached: set[Any] = set()
    stepped: set[Any] = set()
    left: set[Any] = set()
    for _, event in calls:
        if type(event) is Clear and event.optimizer not in reached:
            cleared.add(event.optimizer)
        elif type(event) is Step:
            stepped.add(event.optimizer)
        elif type(event) is Backward:
            reached.update(event.reached)
            left |= stepped.intersection(event.reached)
    return left & cleared


def steps_on_nothing(calls: Iterable[tuple[Key, Event | None]]) -> bool:
    """Whether one of these steps is made after its optimizer's gradients were cleared: the machine counts such steps."""
    held: dict[Any, bool] = {}
    for _, event in calls:
        if type(event) is Backward:
            held.update(dict.fromkeys(event.reached, True))
        elif type(event) is Clear and event.optimizer in held:
            held[event.optimizer] = False
        elif type(event) is Step and not held.get(event.optimizer, True):
            return True
    return False


def _as_now(event: Event) -> Event:
    """The same event with the present scale."""
    if isinstance(event, (Backward, Unscale)) and event.scale is not None:
        scaler = event.scaler if isinstance(event, Unscale) else getattr(event.scale, "watch", None)
        if isinstance(scaler, ScalerWatch):
            return dataclasses.replace(event, scale=scaler.current_scale())
    if isinstance(event, Step) and event.unscales_with is not None and isinstance(event.scaler, ScalerWatch):
        return dataclasses.replace(event, unscales_with=event.scaler.current_scale())
    return event
