"""Backward passes as the routine has them: a glance at one gradient of each optimizer is enough."""

from __future__ import annotations

from gc import get_count
from types import FrameType
from typing import Any, Protocol

from torch import Tensor

from ampguard.capture.protocol.carried_scales import CarriedScales
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.routine import Routine
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.protocol.second_looks import SecondLooks
from ampguard.protocol.events import Backward, Clear
from ampguard.protocol.ledger import scaler_of
from ampguard.protocol.machine import Machine


class Moves(Protocol):
    """What is known of the loop's calls, as far as it is needed here."""

    machine: Machine
    routine: Routine
    carried: CarriedScales
    second_looks: SecondLooks
    scale_was_read: bool


class UsualBackward:
    """Compares a pass with the one that is expected, and tells the machine of one that turns out to be another."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._glances: list[tuple[Tensor | None, int]] = []
        """Before the pass, in the order in which the routine's one reaches the optimizers."""

    def begins(self, losses: Any) -> bool:
        """Whether a backward pass begins as the routine has it."""
        moves = self._moves
        event, carried = moves.routine.expected_backward(), moves.carried
        is_scaled = losses is carried.fresh
        if event is None or is_scaled is not (event.scale is not None):
            moves.routine.leave()
            return False
        if is_scaled and carried.fresh_from is not scaler_of(event.scale):  # a scaler of each epoch's own
            moves.routine.leave()
            return False
        self._glances = []
        for watch in event.reached:
            self._glances.append(watch.glance())  # type: ignore[attr-defined]
        return True

    def forget(self) -> None:
        """It is not known any more what the gradients were."""
        self._glances = []

    def ended(self, frame: FrameType) -> None:
        """It has ended, as usual or not."""
        moves, routine, carried = self._moves, self._moves.routine, self._moves.carried
        event = routine.expected_backward()
        assert event is not None
        watches: tuple[OptimizerWatch, ...] = event.reached  # type: ignore[assignment]
        glances, self._glances = self._glances, []
        empty: tuple[bool, ...] = ()
        reached: list[OptimizerWatch] = []
        for watch, (grad, version) in zip(watches, glances, strict=True):
            now = watch.glance()
            watch.at_rest = [(id(now[0]), now[1])]
            if watch.cleans:
                watch.look_for_bad()
            empty += (grad is None,)
            if now[0] is not grad or now[1] != version:
                reached += (watch,)
        key = ("backward", event.scale is not None, frame.f_code, frame.f_lasti, empty)
        moves.scale_was_read = False
        of = carried.fresh_from
        if not watches and event.scale is not None and of is not None:
            carried.ended_outside = of.current_scale()
        if len(reached) == len(watches) and routine.matches(key):
            moves.second_looks.objects.began = get_count()[0]
            return
        if routine.is_on:
            routine.leave()
        for watch, was_empty in zip(watches, empty, strict=True):
            if was_empty:
                moves.machine.feed(Clear(watch))
        scale = of.current_scale() if event.scale is not None and of is not None else None
        event = Backward(tuple(reached), scale, script_line(frame))
        moves.machine.feed(event)
        routine.note(key, event)
