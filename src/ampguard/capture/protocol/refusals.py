"""What PyTorch refuses: an assertion of a scaler or an optimizer, and which of the possible causes it has."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.loss_scale import window_of
from ampguard.capture.protocol.routine import Routine
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.protocol.watches import Watches
from ampguard.capture.recorder import FlightRecorder
from ampguard.errors import message_of
from ampguard.protocol.events import Breach, Clear, Refused, reason_of
from ampguard.protocol.machine import Machine


class Moves(Protocol):
    """What is known of the loop's calls, as far as it is needed here."""

    recorder: FlightRecorder
    machine: Machine
    routine: Routine
    watches: Watches
    attempt: int

    def mine(self) -> list[OptimizerWatch]: ...

    def tell(self, breaches: Sequence[Breach], step: int) -> None: ...


class Refusals:
    """Tells the machine of them."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self.explain: Callable[[Breach], Breach] = lambda breach: breach
        """What looks at the tensors, where the machine alone cannot tell."""
        self._windows: weakref.WeakKeyDictionary[OptimizerWatch, int | None] = weakref.WeakKeyDictionary()

    def added_to_unscaled(self, watch: OptimizerWatch, losses: Any) -> None:
        """A backward pass begins, and the optimizer holds gradients that were unscaled: is it one of a window of several?"""
        self._windows[watch] = window_of(losses) if isinstance(losses, Tensor) else None

    def refused(
        self, call: str, scaler: Any, optimizer: Optimizer | None, error: Exception, frame: FrameType | None
    ) -> None:
        """PyTorch has raised."""
        reason = reason_of(message_of(error))
        if reason is None:
            return
        moves, machine = self._moves, self._moves.machine
        moves.routine.spoil()
        of = moves.watches.scaler(scaler)
        watch = moves.watches.optimizer(optimizer) if optimizer is not None else None
        found_inf = compat.found_inf(scaler, optimizer) if optimizer is not None else None
        if watch is not None and not watch.has_gradients() and machine.ledger(watch).parts:
            machine.feed(Clear(watch))
        step = moves.recorder.steps.count
        if moves.attempt == step - 1 and self._is_behind_step(call, reason, watch):
            step = moves.attempt
        moved = watch is not None and watch.weights_moved()
        window = self._windows.get(watch) if watch is not None else None
        breaches = machine.feed(Refused(call, reason, of, watch, script_line(frame), found_inf, moved, window))
        if step - 1 in moves.recorder.steps.given_up and any(breach.facts.get("next_iteration") for breach in breaches):
            step -= 1  # it was left behind the first call, and the second is told as part of the next
        moves.tell([self.explain(breach) for breach in breaches], step)

    def _is_behind_step(self, call: str, reason: str, watch: OptimizerWatch | None) -> bool:
        """Whether a call was refused because it came behind the step of its own iteration."""
        moves = self._moves
        if call == "update":
            return not any(moves.machine.ledger(each).backwards_since_step for each in moves.mine())
        if reason != "unscaled-after-step" or watch is None:
            return False
        return not moves.machine.ledger(watch).backwards_since_step
