"""What all probes of the protocol have in common."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.cut_to_zero import CutToZero
from ampguard.capture.patches import Patches
from ampguard.capture.protocol.averages import Averages
from ampguard.capture.protocol.dropped import DroppedGradients
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.habits import Habits
from ampguard.capture.protocol.joined import JoinedParameters
from ampguard.capture.protocol.kept_quantities import KeptQuantities
from ampguard.capture.protocol.listener import BreachListener
from ampguard.capture.protocol.models import Models
from ampguard.capture.protocol.moves import Moves
from ampguard.capture.protocol.never_held import NeverHeld
from ampguard.capture.protocol.own_moves import OwnMoves
from ampguard.capture.protocol.own_steps import OwnSteps
from ampguard.capture.protocol.own_updates import OwnUpdates
from ampguard.capture.protocol.piled_by_hand import PiledByHand
from ampguard.capture.protocol.piled_in_masters import PiledInMasters
from ampguard.capture.protocol.reads import ReadWindow
from ampguard.capture.protocol.scans import Scans, is_time_to_look
from ampguard.capture.protocol.unfrozen import Unfrozen
from ampguard.capture.recorder import FlightRecorder
from ampguard.numerics import is_low_precision
from ampguard.protocol.events import Breach

Call = Callable[..., Any]
REGION_STEPS = 8
"""Steps of an optimizer in which it is looked at what autocast's regions hold."""


class Witness:
    """Whom the probes tell, and what they ask before they do."""

    def __init__(self, recorder: FlightRecorder, listener: BreachListener) -> None:
        self.recorder = recorder
        self.guarded = recorder.barrier.call
        self.patches = Patches()
        self.handles: list[Any] = []
        self.moves = Moves(recorder, listener)
        self.training = self.moves.training
        self.models = Models(recorder)
        close = self.moves.close
        close.own_scale.roots = close.handed_over.roots = self._parameters_of_roots
        recorder.log.written.roots = self._parameters_of_roots
        self.scans = Scans(self.moves, self.models)
        self.unfrozen = Unfrozen(self.moves, self.models)
        self.never_held = NeverHeld(self.moves, self.models)
        self.habits = Habits(self.moves, self.models)
        self.own_steps = OwnSteps(self.moves)
        self.own_updates = OwnUpdates(self.moves, self.models)
        self.piled = PiledByHand(self.moves)
        self.piled_in_masters = PiledInMasters(self.moves)
        self.piled_in_masters.roots = self._parameters_of_roots
        self.kept = KeptQuantities(self.moves, OwnMoves(self.moves, self.own_updates))
        self.window = ReadWindow(self.moves, self.guarded, self.kept, self.own_updates.wrote)
        close.on_gradient = self.window.arrives
        self.dropped = DroppedGradients(recorder, self.moves, self.models)
        self.joined = JoinedParameters(self.moves)
        self.moves.refusals.explain = self.scans.explain_refusal
        recorder.on_raise = self.scans.raised
        recorder.on_written = Averages(self.moves, self.models).written

    def _parameters_of_roots(self) -> list[Iterable[Tensor]]:
        return [compat.all_parameters(root) for root, _ in self.models.roots()]

    def close_window(self) -> None:
        """What is made of a norm is not followed beyond this call."""
        if self.window.is_open:
            self.window.close()

    def stepped(self, watch: OptimizerWatch) -> None:
        """An optimizer's step was attempted."""
        habits, steps = self.habits, watch.steps
        if self.recorder.gradients.cut is not None:
            self._moved_nothing(watch, self.recorder.gradients.cut)
        if habits.watches_regions or habits.region is not None:
            habits.stepped(watch)
            habits.watches_regions = steps < REGION_STEPS or habits.suspects_scaler or habits.region is not None
        may_be_new = watch.lost_one
        self.scans.after_step(watch)
        self.unfrozen.after_step(watch, may_be_new)
        self.never_held.after_step(watch)
        habits.tick()
        if self.moves.looks_closely:
            self.moves.second_looks.looked_before = self.moves.attempt
        is_due = steps == self.moves.second_looks.due
        if self.moves.looks_closely or is_time_to_look(steps) or is_due:
            on, self.moves.looks_on = self.moves.looks_on or is_due, False
            self.moves.looks_closely = on or any(is_time_to_look(w.steps) for w in self.moves.mine())

    def _moved_nothing(self, watch: OptimizerWatch, cut: CutToZero) -> None:
        """An optimizer has stepped; clipping had made these gradients 0."""
        if cut.holds(watch.parameters()):
            cause = "fp16-overflow" if is_low_precision(cut.dtype) else "overflow"
            self.moves.tell([Breach(cause, watch, None, cut.line, facts={"cut": cut})], self.moves.attempt)

    def noting(
        self, before: Call | None = None, after: Call | None = None, of_gradients: bool = False
    ) -> Callable[[Call], Call]:
        """Wrap a function that is called rarely: `before` and `after` get the caller's frame and the first arguments.

        `of_gradients`: it is about the gradients of whoever calls it, and followed only in the thread that trains.
        """
        guarded, recorder, window, training = self.guarded, self.recorder, self.window, self.training

        def watch(original: Call) -> Call:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling() or not recorder.active:
                    return original(*args, **kwargs)
                is_other = get_ident() != training.ident
                if is_other and of_gradients and not guarded(training.hears):
                    return original(*args, **kwargs)
                if recorder.paused:
                    guarded(training.missed)
                    return original(*args, **kwargs)
                if window.is_open and not is_other:
                    guarded(window.close)
                if before is not None:
                    guarded(before, sys._getframe(1), *args[:2])
                result = original(*args, **kwargs)
                if after is not None:
                    guarded(after, sys._getframe(1), *args[:2])
                return result

            return call

        return watch

    def unclosing(self, before: Call) -> Callable[[Call], Call]:
        """As `noting`, for a call between computing a norm and using it."""
        guarded, recorder, training = self.guarded, self.recorder, self.training

        def watch(original: Call) -> Call:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                is_paused = recorder.paused and not self.window.is_within_backward
                if recorder.active and not is_paused and (get_ident() == training.ident or not training.ident):
                    guarded(before, None, *args)
                return original(*args, **kwargs)

            return call

        return watch
