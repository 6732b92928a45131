"""Iterations that are looked at closely because the script does to gradients what it has not done before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.recorder import FlightRecorder
from ampguard.protocol.events import Breach

MAX_SURPRISES = 8
"""Such iterations of a run."""


class Looking(Protocol):
    """The moves, as far as they are known here."""

    looks_closely: bool
    looks_on: bool

    @property
    def recorder(self) -> FlightRecorder: ...
    def tell(self, breaches: Sequence[Breach], step: int) -> None: ...


class SecondLooks:
    """Asks for them, and says since when what they show has been so."""

    def __init__(self, moves: Looking) -> None:
        self.looked_before: int | None = None
        """The last iteration that was looked at closely and is over."""
        self._moves = moves
        self._surprises = 0

    def divided_as_usual(self, watch: OptimizerWatch) -> None:
        """The scaler is about to divide, as the routine has it. Has the script begun to write to the gradients before?"""
        if watch.usually_touched is False and not watch.is_untouched():
            self.ask(watch)

    def ask(self, *watches: OptimizerWatch) -> None:
        """Something unusual was done to their gradients, or is about to: the next iteration is looked at closely too."""
        if self._surprises < MAX_SURPRISES:
            self._surprises += 1
            step = self._moves.recorder.steps.count
            for watch in watches:
                is_new = watch.odd is None or watch.odd[1] < step - 1
                watch.odd = step if is_new or watch.odd is None else watch.odd[0], step
            self._moves.looks_closely = self._moves.looks_on = True

    def since(self, watch: OptimizerWatch) -> int:
        """The iteration in which began what a close look has found just now."""
        step = self._moves.recorder.steps.count
        return watch.odd[0] if watch.odd is not None and watch.odd[1] >= step - 1 else step

    def tell(self, breaches: Sequence[Breach], watch: OptimizerWatch) -> None:
        """What only a close look shows: told with the iteration in which that had not found it, where some lie between."""
        step, before = self.since(watch), self.looked_before
        if before is not None and step - before > 1:
            for breach in breaches:
                breach.facts["not_in_step"] = before
        self._moves.tell(breaches, step)
