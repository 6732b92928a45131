"""Norms of gradients, and clipping: of gradients that are still scaled, both say nothing."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol

from torch import Tensor

from ampguard.capture.protocol.clipped import ClippedGradients
from ampguard.capture.protocol.close_look import CloseLook
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.protocol.watches import ScalerWatch
from ampguard.capture.record import Line
from ampguard.capture.recorder import FlightRecorder
from ampguard.protocol.events import Breach, Read
from ampguard.protocol.machine import Machine
from ampguard.protocol.states import Stage


class Moves(Protocol):
    """What is known of the loop's calls, as far as it is needed here."""

    recorder: FlightRecorder
    machine: Machine
    close: CloseLook
    clipped: ClippedGradients
    stepping: tuple[ScalerWatch, OptimizerWatch, Line | None] | None
    unscaled_inside: bool

    def mine(self) -> list[OptimizerWatch]: ...
    def tell(self, breaches: Sequence[Breach], step: int) -> None: ...


class Norms:
    """Tells the machine whose gradients were measured or clipped."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves

    def measured(self, gradients: Any, clips: bool, frame: FrameType | None, norm_is_given: bool = False) -> None:
        """The norm of some gradients was computed, or they were clipped, perhaps by one that was computed before."""
        moves = self._moves
        divided = moves.stepping[1] if moves.stepping is not None and moves.unscaled_inside else None
        for watch in self.whose(gradients):
            if watch is divided:
                continue  # within the scaler's own step, which has unscaled
            if watch.divides_by_hand or moves.close.is_divided(watch):
                continue  # the scale is out of them, though it may not have been seen this time
            breaches, step = moves.machine.feed(Read(watch, script_line(frame), clips)), moves.recorder.steps.count
            for breach in breaches:
                breach.facts["norm_is_given"] = norm_is_given
            if clips and breaches and moves.stepping is None:
                moves.clipped.hold(watch, breaches, step)  # no harm comes of it before they are used
            else:
                moves.tell(breaches, step)

    def whose(self, gradients: Any) -> list[OptimizerWatch]:
        """The optimizers some of whose gradients (or of the parameters that have them) these are."""
        machine = self._moves.machine
        tensors = [gradients] if isinstance(gradients, Tensor) else gradients
        ids = {id(t) for t in tensors} | {id(t.grad) for t in tensors if t.is_leaf and t.requires_grad}
        mine = self._moves.mine()
        found = [w for w in mine if any(p.grad is not None and id(p.grad) in ids for p in w.sample)]
        return [w for w in found if not machine.stage(w).is_scaled or not self._are_true(w, ids)]

    def _are_true(self, watch: OptimizerWatch, ids: set[int]) -> bool:
        """Whether those gradients of an optimizer are also another's, which has had them divided."""
        machine = self._moves.machine
        others = [w for w in self._moves.mine() if w is not watch and machine.stage(w) is Stage.UNSCALED]
        divided = {id(p) for other in others for p in other.parameters()}
        read = [p for p in watch.sample if id(p.grad) in ids] if divided else []
        return bool(read) and all(id(p) in divided for p in read)
