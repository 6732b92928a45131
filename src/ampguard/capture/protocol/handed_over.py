"""Gradients of one model that the script hands to another's optimizer: do they still carry the loss scale there?

A worker differentiates its own copy of a model and the shared one's optimizer steps (A3C), a float16 model has float32
masters. The scaled backward pass reaches no optimizer; a few small gradients are copied after it, in iterations that are
looked at closely, and looked for among those that an optimizer is about to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from ampguard.capture.protocol.assigned import APART
from ampguard.capture.protocol.copied_gradients import LooseGradients
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.loss_scale import DeviceScale
from ampguard.capture.record import Line
from ampguard.protocol.events import Backward, Clear, Divided
from ampguard.protocol.states import Stage

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Moves


class HandedOver:
    """Follows such gradients from the backward pass to whoever uses them."""

    def __init__(self, moves: Moves) -> None:
        self.roots: Callable[[], Iterable[Iterable[Tensor]]] = tuple
        """The parameters of each module that was called."""
        self._moves = moves
        self.loose: LooseGradients | None = None
        """None unless the last backward pass has left such gradients."""
        self._scale: DeviceScale | None = None

    def after_backward(
        self, reached: tuple[OptimizerWatch, ...], scale: DeviceScale | None, where: Line | None
    ) -> None:
        """Gradients of a scaled loss that no optimizer holds may be meant for another one."""
        self._scale = scale if not reached else None
        self.loose = LooseGradients.of(self.roots(), float(scale), where) if scale is not None and not reached else None

    def settle(self, watch: OptimizerWatch) -> None:
        """An optimizer's gradients are about to be used, and no backward pass has made them: tell the machine which did."""
        loose, scale, machine = self.loose, self._scale, self._moves.machine
        if loose is None or scale is None or machine.stage(watch) not in (Stage.EMPTY, Stage.USED):
            return
        found = loose.in_masters(watch.parameters())
        if found is None:
            return
        apart = min(APART, loose.scale**0.5 / 2)
        is_divided = 1 / apart <= found.ratio / loose.scale <= apart
        if not is_divided and not 1 / apart <= found.ratio <= apart:
            return
        machine.feed(Clear(watch))
        machine.feed(Backward((watch,), scale, loose.where))
        if is_divided:
            machine.feed(Divided(watch, scale.watch, scale, None))
        watch.divides_by_hand = is_divided
        watch.set_by_hand = True
        self._moves.scale_was_read = False  # whether it was used to divide by is known
        watch.rest()
