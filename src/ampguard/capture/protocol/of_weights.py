"""Gradients that a script makes of weights alone: the difference to weights that were trained elsewhere (Reptile, Lookahead).

No backward pass has made them and no loss scale is in them, so a scaler must not divide them. That nothing else went into
them shows in what the script computes between two steps, once an optimizer was stepped with gradients of unknown origin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ampguard import compat
from ampguard.capture.events.operands import held_by, refs_of
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.record import GlueOp, Held, Line, Ref
from ampguard.protocol.states import Stage

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Moves

MOST_TRIES = 3
MOST_STEPS = 128
"""For which all is recorded that runs between two steps."""


class MadeOfWeights:
    """Follows what is computed of weights, from one step of such an optimizer to the next."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._tries = 0
        self._until = -1
        self._seen = -1
        """The last event that was looked at."""
        self._known = compat.by_tensor()
        """Tensors that were made of weights and numbers alone, with the line that did and their version: what else has
        written to them since was not seen."""

        self._gone: set[Ref] = set()
        """Results that were such and that nobody holds any more."""

    @property
    def is_open(self) -> bool:
        return self._until >= 0

    def unknown(self, watch: OptimizerWatch) -> bool:
        """Whether no backward pass is known that has made an optimizer's gradients."""
        return self._moves.machine.stage(watch) is Stage.EMPTY and watch.has_gradients()

    def settle(self, watch: OptimizerWatch) -> Line | None:
        """A scaler is about to divide gradients of unknown origin: the line that made them, if that was of weights alone."""
        if self.is_open:
            self.look()
            made = [self._line_of(p.grad) for p in watch.sample if p.grad is not None]
            if (
                made and None not in made and not self._moves.scale_was_read
            ):  # (else they may have been multiplied by it)
                self._end()
                self._tries = MOST_TRIES
                return made[-1]
        elif self._tries < MOST_TRIES:
            self._tries += 1
            self._until = self._moves.recorder.steps.count + MOST_STEPS
            self._seen = self._moves.recorder.log.next_index - 1
            schedule = self._moves.recorder.schedule
            schedule.tapes_all, schedule.has_no_prefix = True, False
        return None

    def look(self) -> None:
        """Before what was recorded since the last look is forgotten."""
        recorder = self._moves.recorder
        if recorder.steps.count > self._until:
            self._end()
            return
        watches = self._moves.watches.optimizers
        weights = {compat.storage_key(p) for watch in watches for p in watch.parameters()} - {0}
        for event in recorder.log.slice().events:
            if event.index > self._seen and isinstance(event, GlueOp):
                self._seen = event.index
                self._follow(event, weights)

    def _follow(self, event: GlueOp, weights: set[int]) -> None:
        given: list[Held | Ref] = [*held_by(event), *refs_of(event)]
        is_known = all(self._is_known(operand, weights) for operand in given)
        written = [event.args[i] for i in compat.positions_written(event.func) if i < len(event.args)]
        for operand in written:
            tensor = self._tensor_of(operand)
            if tensor is not None:
                before = operand.version if isinstance(operand, Held) else self._known.get(tensor, (None, -2))[1]
                self._note(tensor, event.line if is_known else None, before + 1)
        for position, output in enumerate(event.outputs) if not written else ():
            tensor = output()
            if tensor is None and is_known:
                self._gone.add(Ref(event.index, position))
            elif tensor is not None:
                is_view = compat.is_view(event.func)
                self._note(tensor, event.line if is_known else None, compat.version_of(tensor) if is_view else 0)

    def _note(self, tensor: Tensor, line: Line | None, version: int) -> None:
        if line is not None:
            self._known[tensor] = line, version
        else:
            self._known.pop(tensor, None)

    def _is_known(self, operand: Held | Ref, weights: set[int]) -> bool:
        tensor = self._tensor_of(operand)
        if tensor is None:
            return isinstance(operand, Ref) and operand in self._gone
        is_weight = (tensor.is_leaf and tensor.requires_grad) or compat.storage_key(tensor) in weights
        if is_weight or not tensor.is_floating_point():
            return True
        line, version = self._known.get(tensor, (None, -1))
        return line is not None and (not isinstance(operand, Held) or operand.version == version)

    def _line_of(self, tensor: Tensor) -> Line | None:
        line, version = self._known.get(tensor, (None, -1))
        return line if version == compat.version_of(tensor) else None

    def _tensor_of(self, operand: object) -> Tensor | None:
        if isinstance(operand, Held):
            return operand.tensor
        event = self._moves.recorder.log.record.event(operand.event) if isinstance(operand, Ref) else None
        is_there = event is not None and isinstance(operand, Ref) and operand.output < len(event.outputs)
        return event.outputs[operand.output]() if event is not None and isinstance(operand, Ref) and is_there else None

    def _end(self) -> None:
        self._until = -1
        self._known = compat.by_tensor()
        self._gone = set()
        self._moves.recorder.schedule.tapes_all = False
