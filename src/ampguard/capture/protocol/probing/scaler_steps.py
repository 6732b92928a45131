"""The probes of a scaler's `unscale_` and `step`."""

from __future__ import annotations

import functools
import sys
from threading import get_ident
from typing import Any

from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.habits import NEEDLESS_STEPS
from ampguard.capture.protocol.moves import Frame
from ampguard.capture.protocol.probing.witness import Call, Witness
from ampguard.capture.protocol.scans import LOOKS
from ampguard.capture.protocol.watches import ScalerWatch


class ScalerStepProbe:
    """Tells the moves whose gradients are divided, and which optimizer the scaler let step."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness

    def install(self) -> None:
        replace = self._witness.patches.replace
        replace(compat.GRAD_SCALER, "unscale_", self._watch_unscale)
        replace(compat.GRAD_SCALER, "step", self._watch_step)
        rescaled = self._witness.moves.rescaled
        note = self._witness.noting(after=lambda frame, scaler, own: rescaled(scaler, own, frame), of_gradients=True)
        replace(compat.BorrowedScaler, "rescale_as", note)

    def _watch_unscale(self, original: Call) -> Call:
        witness, moves = self._witness, self._witness.moves
        guarded, recorder, training = witness.guarded, witness.recorder, witness.training
        routine, by_id = moves.routine, moves.watches.by_id

        @functools.wraps(original)
        def unscale_(self_: Any, optimizer: Any) -> Any:
            if get_ident() != training.ident and not guarded(training.hears, optimizer):
                return original(self_, optimizer)
            if moves.stepping is not None:  # inside a step: its wrapper tells all
                result = original(self_, optimizer)
                moves.unscaled_inside = True
                return result
            if recorder.paused or not recorder.active:
                guarded(training.missed)
                return original(self_, optimizer)
            if routine.is_on:
                of, watch, frame = by_id.get(id(self_)), by_id.get(id(optimizer)), sys._getframe(1)
                if of is not None and not of.is_enabled:
                    return original(self_, optimizer)
                if routine.matches(("unscale", of, watch, frame.f_code, frame.f_lasti)):
                    if watch is not None and watch.was_bad:
                        guarded(moves.close.tell_hidden, watch, of)
                    guarded(moves.second_looks.divided_as_usual, watch)
                    try:
                        return original(self_, optimizer)
                    except Exception as error:
                        guarded(moves.refusals.refused, "unscale_", self_, optimizer, error, frame)
                        raise
            guarded(self._before_unscale, self_, optimizer, sys._getframe(1))
            try:
                result = original(self_, optimizer)
            except Exception as error:
                guarded(moves.refusals.refused, "unscale_", self_, optimizer, error, sys._getframe(1))
                raise
            guarded(moves.unscaled, self_, optimizer, sys._getframe(1))
            return result

        return unscale_

    def _watch_step(self, original: Call) -> Call:
        witness, moves = self._witness, self._witness.moves
        guarded, recorder, training = witness.guarded, witness.recorder, witness.training
        routine, by_id = moves.routine, moves.watches.by_id

        @functools.wraps(original)
        def step(self_: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.active or (get_ident() != training.ident and not guarded(training.hears, optimizer)):
                return original(self_, optimizer, *args, **kwargs)
            if recorder.paused or moves.stepping is not None:
                guarded(training.missed)
                return original(self_, optimizer, *args, **kwargs)
            of, watch = (by_id.get(id(self_)), by_id.get(id(optimizer))) if routine.is_on else (None, None)
            if of is not None and watch is not None:
                frame = sys._getframe(1)
                divides = routine.divides_next
                if routine.matches(("step", of, watch, frame.f_code, frame.f_lasti)):
                    moves.attempt = recorder.steps.count
                    watch.stepped = False
                    moves.stepping = (of, watch, None)
                    if divides and watch.was_bad:
                        guarded(moves.close.tell_hidden, watch, of)
                    if divides:
                        guarded(moves.second_looks.divided_as_usual, watch)
                    try:
                        return original(self_, optimizer, *args, **kwargs)
                    except Exception as error:
                        guarded(moves.refusals.refused, "step", self_, optimizer, error, frame)
                        raise
                    finally:
                        moves.stepping = None
                        if not watch.stepped and not isinstance(optimizer, Optimizer):
                            watch.stepped = bool(guarded(compat.let_step_unseen, self_, optimizer))
                        self._stepped_as_usual(of, watch)
            guarded(self._before_step, self_, optimizer, sys._getframe(1))
            try:
                result = original(self_, optimizer, *args, **kwargs)
            except BaseException as error:
                moves.stepping = None
                if isinstance(error, Exception):
                    guarded(moves.refusals.refused, "step", self_, optimizer, error, sys._getframe(1))
                raise
            if moves.stepping is not None:
                guarded(self._after_step, self_, optimizer)
                moves.stepping = None
            return result

        return step

    def _before_unscale(self, scaler: Any, optimizer: Any, frame: Frame) -> None:
        self._settle_own_updates()
        self._witness.close_window()
        self._witness.moves.before_unscale(scaler, optimizer, frame)

    def _before_step(self, scaler: Any, optimizer: Any, frame: Frame) -> None:
        self._settle_own_updates()
        self._witness.close_window()
        self._witness.moves.before_scaler_step(scaler, optimizer, frame)

    def _settle_own_updates(self) -> None:
        if self._witness.own_updates.is_open:
            self._witness.own_updates.before_optimizers()

    def _after_step(self, scaler: Any, optimizer: Any) -> None:
        witness = self._witness
        witness.dropped.stepped()
        if witness.own_updates.is_open:
            witness.own_updates.stepped()
        stepping = witness.moves.stepping
        if stepping is not None and not stepping[1].stepped:
            stepping[1].stepped = compat.let_step_unseen(scaler, optimizer)
        of, watch = witness.moves.after_scaler_step(scaler, optimizer)
        witness.stepped(watch)
        if of.is_enabled:
            witness.habits.after_scaler_step(of, watch)
            witness.habits.renewed.stepped(of, watch)
            if watch.steps in LOOKS:
                witness.habits.idle.look(of, watch)
                witness.habits.watches_regions |= bool(witness.habits.idle.suspected)

    def _stepped_as_usual(self, of: ScalerWatch, watch: OptimizerWatch) -> None:
        witness, habits = self._witness, self._witness.habits
        if witness.dropped.waiting or not watch.stepped:  # (else the optimizer's own hook has said so)
            witness.dropped.stepped()
        is_enabled = of.is_enabled
        of.steps += is_enabled
        steps = watch.steps = watch.steps + 1
        watch.taken += watch.stepped
        watch.was_skipped = not watch.stepped
        judges = (
            habits.suspects_scaler and is_enabled and (of.steps <= NEEDLESS_STEPS or of.steps & (of.steps - 1) == 0)
        )
        asks = watch.candidates or watch.lost_one or habits.saved_without is not None or habits.region is not None
        if asks or judges or steps in LOOKS or steps == witness.moves.second_looks.due:
            witness.guarded(witness.stepped, watch)
            if habits.suspects_scaler and is_enabled:
                witness.guarded(habits.after_scaler_step, of, watch)
            if steps in LOOKS and is_enabled:
                witness.guarded(habits.idle.look, of, watch)
                habits.watches_regions |= bool(habits.idle.suspected)
        elif not steps & witness.unfrozen.mask or (witness.unfrozen.sample and witness.unfrozen.is_thawed()):
            witness.guarded(witness.unfrozen.look, watch)
