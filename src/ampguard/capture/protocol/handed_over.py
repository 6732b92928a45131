"""Gradients of one model that the script hands to another's optimizer: do they still carry the loss scale there?

A worker differentiates its own copy of a model and the shared one's optimizer steps (A3C), a float16 model has float32
masters, adapted copies give the sum of their gradients to the model that they were made of (first-order MAML). The scaled
backward pass reaches no optimizer; a few small gradients are copied after it, in iterations that are looked at closely, and
looked for among those that an optimizer is about to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from ampguard.capture.protocol.assigned import APART
from ampguard.capture.protocol.copied_gradients import LooseGradients, size_of_sum
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.loss_scale import DeviceScale
from ampguard.capture.record import Line
from ampguard.protocol.events import Backward, Clear, Divided
from ampguard.protocol.states import Stage

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Moves

MOST_PASSES = 16


class HandedOver:
    """Follows such gradients from the backward pass to whoever uses them."""

    def __init__(self, moves: Moves) -> None:
        self.roots: Callable[[], Iterable[Iterable[Tensor]]] = tuple
        """The parameters of each module that was called."""
        self._moves = moves
        self.loose: LooseGradients | None = None
        """None unless the last backward pass has left such gradients."""
        self._scale: DeviceScale | None = None
        self._passes: list[LooseGradients] = []
        """Those of all passes since such gradients were used."""
        self._were_used = False
        self._is_looked_for = False
        """An optimizer was about to use gradients that no backward pass is known to have made: those of passes that have
        reached another optimizer are copied, too."""

    def after_backward(
        self, reached: tuple[OptimizerWatch, ...], scale: DeviceScale | None, where: Line | None
    ) -> None:
        """Gradients of a scaled loss that no optimizer holds may be meant for another one."""
        is_followed = scale is not None and (self._is_looked_for or not reached)
        self._scale = scale if is_followed else None
        self.loose = LooseGradients.of(self.roots(), float(scale), where) if is_followed and scale is not None else None
        if self._were_used or (self.loose is not None and any(p.scale != self.loose.scale for p in self._passes)):
            self._passes, self._were_used = [], False
        if self.loose is not None and len(self._passes) < MOST_PASSES:
            self._passes.append(self.loose)

    def settle(self, watch: OptimizerWatch) -> None:
        """An optimizer's gradients are about to be used, and no backward pass has made them: tell the machine which did."""
        loose, scale, machine = self.loose, self._scale, self._moves.machine
        if loose is None or scale is None:
            self._is_looked_for = self._is_looked_for or (machine.stage(watch) is Stage.EMPTY and watch.has_gradients())
            return
        self._were_used = True
        size = self._size(loose, watch)
        apart = min(APART, loose.scale**0.5 / 2)
        is_divided = size is not None and 1 / apart <= size * loose.scale <= apart
        if size is None or (not is_divided and not 1 / apart <= size <= apart):
            return
        machine.feed(Clear(watch))
        machine.feed(Backward((watch,), scale, loose.where))
        if is_divided:
            machine.feed(Divided(watch, scale.watch, scale, None))
        watch.divides_by_hand = is_divided
        watch.set_by_hand = True
        self._moves.scale_was_read = False  # whether it was used to divide by is known
        watch.rest()

    def _size(self, loose: LooseGradients, watch: OptimizerWatch) -> float | None:
        """How large the gradients in place are beside those of the passes; None where they were not made of them."""
        found = loose.in_masters(watch.parameters())
        if found is not None:
            return 1 / found.ratio
        return size_of_sum(self._passes, watch.sample) if len(self._passes) > 1 else None
