"""An optimizer all of whose parameters were frozen in the middle of a run, and that is stepped on.

A GAN that freezes its critic for the generator's loss and does not unfreeze it trains a generator against a critic that
never changes. Who freezes a part of a model on purpose goes on to use the gradients that the same loss gives the rest of it;
here nobody uses what the loss before this step gives to others: it is differentiated in vain.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.protocol.events import Backward, Breach

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Moves

ENOUGH_STEPS = 3
"""In a row: in the first one it is not known yet what becomes of the gradients."""


class FrozenSince:
    """Asked after a step of an optimizer that had gradients and of whose parameters none has one now."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._steps: weakref.WeakKeyDictionary[OptimizerWatch, int] = weakref.WeakKeyDictionary()

    def look(self, watch: OptimizerWatch) -> None:
        machine = self._moves.machine
        last, parameters = machine.last_backward, watch.parameters()
        if last is None or not self._is_in_vain(last, watch) or not is_frozen(parameters):
            self._steps.pop(watch, None)
            return
        steps = self._steps[watch] = self._steps.get(watch, 0) + 1
        if steps == ENOUGH_STEPS:
            facts: dict[str, Any] = {"parameters": parameters, "of": len(parameters), "steps": steps}
            facts |= {"why": "frozen", "in_vain": True}
            breach = Breach("no-gradients", watch, None, last.where, machine.ledger(watch).stepped_at, None, facts)
            self._moves.tell([breach], min(watch.without_since.values(), default=self._moves.attempt))

    def _is_in_vain(self, last: Backward, watch: OptimizerWatch) -> bool:
        """Whether all that the last backward pass has reached threw its gradients away the last time."""
        if not last.reached or watch in last.reached or last.where is None:
            return False
        return all(self._moves.machine.ledger(other).wasted == last.where for other in last.reached)


def is_frozen(parameters: list[Tensor]) -> bool:
    """Whether there are any, and none wants a gradient."""
    return bool(parameters) and not any(p.requires_grad for p in parameters)
