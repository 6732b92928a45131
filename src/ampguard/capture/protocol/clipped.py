"""Clipping of gradients that are still scaled, a suspicion until an optimizer makes use of them.

Gradients that are cleared before anybody has stepped with them were clipped in vain, and no harm came of it: a framework
may clip what is left of a window whose last batch was skipped (Lightning, where `training_step` returns None).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.protocol.events import Breach

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Moves


class ClippedGradients:
    """By optimizer: what is to be told, and in which iteration it happened."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._held: weakref.WeakKeyDictionary[OptimizerWatch, list[tuple[Breach, int]]] = weakref.WeakKeyDictionary()

        self._part_of_another: weakref.WeakSet[OptimizerWatch] = weakref.WeakSet()
        """Those that step past the scaler with what they clip: that was told."""

    def hold(self, watch: OptimizerWatch, breaches: Sequence[Breach], step: int) -> None:
        """They were clipped: the words are found now, where the script's names are in reach."""
        self._moves.routine.spoil()
        if watch in self._part_of_another:
            return
        held = self._held.setdefault(watch, [])
        for breach in breaches:
            self._moves.name_scaler(breach)
            self._moves.listener.on_suspicion(("clipped", watch, len(held)), breach, step)
            held.append((breach, step))

    def stepped_past(self, watch: OptimizerWatch, breaches: Sequence[Breach]) -> None:
        """The optimizer has stepped with them by itself. Where that passed the scaler, the clipping is part of that breach."""
        past = next((breach for breach in breaches if breach.cause == "bypassed-scaler"), None)
        if past is None or watch not in self._held:
            self.used(watch)
            return
        past.facts["clipped_at"] = self._held[watch][0][0].again
        self._part_of_another.add(watch)
        self.gone(watch)

    def used(self, watch: OptimizerWatch) -> None:
        """They are about to be divided by the scaler, or stepped with."""
        for number, (breach, step) in enumerate(self._held.pop(watch, ()) if self._held else ()):
            self._moves.listener.on_confirmed(("clipped", watch, number), breach, step)

    def gone(self, watch: OptimizerWatch) -> None:
        """They were cleared."""
        for number, _ in enumerate(self._held.pop(watch, ()) if self._held else ()):
            self._moves.listener.on_suspicion(("clipped", watch, number), None, 0)
