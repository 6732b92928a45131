"""How often a step may be held off: audibly, and never for ever."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch.optim import Optimizer

from ampguard.run.stopping import Stopping
from ampguard.stderr import say

IN_A_ROW = 10
"""Steps held off one after another, after which the run ends: a bad batch is one, and a fault does not go away."""

WHILE_SCALE_FALLS = 32
"""The same, while a loss scale above 1 is still falling: from 65536 it takes 16 steps to 1."""

SETTLING = "gradients while the loss scale fell"
LOSS = "the loss"
GRADIENTS = "gradients"


class Patience:
    """Counts held-off steps, says them, and loses itself."""

    def __init__(self, step: Callable[[], int], diagnosis: Callable[[], str | None], stopping: Stopping) -> None:
        self._step = step
        self._diagnosis = diagnosis
        self._stopping = stopping
        self._in_a_row: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._futile: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._number = 0
        self._counts: dict[str, int] = {}
        """Steps held off, by why."""

    def attempting(self) -> None:
        """An optimizer is to step: the step that is spoken of from now on."""
        self._number = self._step()

    def stepped(self, optimizer: Optimizer) -> None:
        """It stepped: its own row is over, those of other optimizers are not."""
        self._in_a_row[optimizer] = self._futile[optimizer] = 0

    def held_off(self, optimizer: Optimizer, what: str, loss_scale: float | None) -> None:
        """Its step was not made because `what` is not finite. Raises StopRun after too many of its steps in a row."""
        in_a_row = self._in_a_row[optimizer] = self._in_a_row.get(optimizer, 0) + 1
        futile = self._futile.get(optimizer, 0)
        is_settling = loss_scale is not None and loss_scale > 1.0
        if not is_settling:
            futile = self._futile[optimizer] = futile + 1
        self._tell(LOSS if what == LOSS else SETTLING if is_settling else GRADIENTS, what, loss_scale)
        if futile >= IN_A_ROW or in_a_row >= WHILE_SCALE_FALLS:
            reason = f"{in_a_row} steps in a row were not finite"
            known = self._diagnosis()
            say(f"{reason}; the run ends here. " + (known or "Nothing was found that explains them."))
            self._stopping.now(reason, 3)

    def _tell(self, why: str, what: str, loss_scale: float | None) -> None:
        """Say the first of each kind; count all."""
        self._counts[why] = self._counts.get(why, 0) + 1
        if self._counts[why] == 1:
            scale = f", loss scale {loss_scale:g}" if loss_scale is not None else ""
            verb = "is" if why == LOSS else "are"
            say(f"step {self._number}: held off, {what} {verb} not finite{scale} (more of these are counted, not said)")

    def close(self) -> None:
        """The run is over: how many steps were held off, where that was not said already."""
        total = sum(self._counts.values())
        if total > len(self._counts):
            parts = ", ".join(f"{count} for {why}" for why, count in self._counts.items())
            say(f"{total} steps were held off in all: {parts}")
