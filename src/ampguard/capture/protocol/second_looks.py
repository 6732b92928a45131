"""Iterations that are looked at closely because the script does to gradients what it has not done before."""

from __future__ import annotations

from collections.abc import Sequence
from gc import get_count
from typing import Protocol

from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.new_objects import NewObjects
from ampguard.capture.protocol.routine import Routine
from ampguard.capture.recorder import FlightRecorder
from ampguard.protocol.events import Breach

MAX_SURPRISES = 8
"""Such iterations of a run."""

STEPS_EACH = 256
"""Steps after which there may be one more."""


class Looking(Protocol):
    """The moves, as far as they are known here."""

    looks_closely: bool
    looks_on: bool
    routine: Routine

    @property
    def recorder(self) -> FlightRecorder: ...
    def tell(self, breaches: Sequence[Breach], step: int) -> None: ...


class SecondLooks:
    """Asks for them, and says since when what they show has been so."""

    def __init__(self, moves: Looking) -> None:
        self.looked_before: int | None = None
        """The last iteration that was looked at closely and is over."""
        self.due = -1
        """The number of an optimizer's steps after which the next look was asked for."""
        self.objects = NewObjects()
        self._due_since = 0
        self._moves = moves
        self._surprises = 0

    def divided_as_usual(self, watch: OptimizerWatch) -> None:
        """The scaler is about to divide, as the routine has it. Has the script begun to write to the gradients, or to read
        them, before?"""
        place, left = self._moves.routine.place, get_count()[0] - self.objects.began
        if watch.usually_touched is False and not watch.is_untouched():
            self.ask(watch)
        elif left != (usual := self.objects.usual[place]) and usual is not None:
            expected = self.objects.unusual(place, left, watch.steps, self._moves.recorder.steps.count)
            if expected is not None and self._may_ask():
                self.due, self._due_since = expected.steps, expected.first

    def divided(self, watch: OptimizerWatch) -> None:
        """The same in an iteration that is told to the machine in full."""
        was_touched, watch.usually_touched = watch.usually_touched, not watch.is_untouched()
        if was_touched is False and watch.usually_touched and not self._moves.looks_closely:
            self.ask(watch)

    def ask(self, *watches: OptimizerWatch) -> None:
        """Something unusual was done to their gradients, or is about to: the next iteration is looked at closely too."""
        if self._moves.looks_on or self._may_ask():
            step = self._moves.recorder.steps.count
            for watch in watches:
                is_new = watch.odd is None or watch.odd[1] < step - 1
                watch.odd = step if is_new or watch.odd is None else watch.odd[0], step
            self._moves.looks_closely = self._moves.looks_on = True

    def _may_ask(self) -> bool:
        may = self._surprises < MAX_SURPRISES + self._moves.recorder.steps.count // STEPS_EACH
        self._surprises += may
        return may

    def since(self, watch: OptimizerWatch) -> int:
        """The iteration in which began what a close look has found just now."""
        step = self._moves.recorder.steps.count
        return watch.odd[0] if watch.odd is not None and watch.odd[1] >= step - 1 else step

    def read_since(self, step: int, *watches: OptimizerWatch) -> int:
        """The iteration since which gradients are read as they are in this one, number `step`."""
        return min(step, self._due_since) if any(watch.steps == self.due for watch in watches) else step

    def tell(self, breaches: Sequence[Breach], watch: OptimizerWatch) -> None:
        """What only a close look shows: told with the iteration in which that had not found it, where some lie between."""
        step, before = self.since(watch), self.looked_before
        if any(breach.cause == "clip-before-unscale" for breach in breaches):
            step = self.read_since(step, watch)
        if before is not None and step - before > 1:
            for breach in breaches:
                breach.facts["not_in_step"] = before
        self._moves.tell(breaches, step)
