"""The probes of a scaler: made, loaded and saved; `scale` and `update`."""

from __future__ import annotations

import functools
import sys
from threading import get_ident
from typing import Any

import torch

from ampguard import compat
from ampguard.capture.protocol.moves import Frame
from ampguard.capture.protocol.probing.witness import Call, Witness
from ampguard.capture.protocol.script_lines import framework_in, script_line


class ScalingProbe:
    """Tells the moves which scale a loss was multiplied by, and when it changed."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness

    def install(self) -> None:
        witness, kind = self._witness, compat.GRAD_SCALER
        moves, habits, replace, noting = witness.moves, witness.habits, witness.patches.replace, witness.noting

        def read(frame: Frame, scaler: Any) -> None:
            moves.scale_read(scaler)

        replace(kind, "__init__", noting(after=lambda frame, scaler, *_: moves.scaler_created(scaler, frame)))
        replace(kind, "scale", self._watch_scale)
        replace(kind, "update", self._watch_update)
        replace(kind, "load_state_dict", noting(before=self._before_loading, after=self._loaded))
        replace(kind, "state_dict", noting(before=lambda frame, scaler: habits.state_asked(scaler)))
        replace(kind, "get_scale", witness.unclosing(read))

    def _before_loading(self, frame: Frame, scaler: Any, *_: Any) -> None:
        """Keep the scale, as before an update: gradients may be about that carry it."""
        moves = self._witness.moves
        moves.routine.spoil()
        moves.before_update(moves.watches.scaler(scaler))

    def _loaded(self, frame: Frame, scaler: Any, *_: Any) -> None:
        moves = self._witness.moves
        of = moves.watches.scaler(scaler)
        of.scale, of.loaded = None, True
        moves.machine.session(of).loaded_at = script_line(frame)

    def _watch_scale(self, original: Call) -> Call:
        witness, moves = self._witness, self._witness.moves
        guarded, recorder, training, routine = witness.guarded, witness.recorder, witness.training, moves.routine

        @functools.wraps(original)
        def scale(self_: Any, outputs: Any) -> Any:
            result = original(self_, outputs)
            if get_ident() != training.ident and not guarded(training.hears):
                return result
            if recorder.paused:
                guarded(training.missed)
                guarded(recorder.drivers.trains, sys._getframe(1))
            elif recorder.active:
                if routine.is_on and moves.carried.fresh is None and type(result) is torch.Tensor:
                    moves.carried.fresh = (
                        result  # by the scaler that scales in every iteration, or the backward will tell
                    )
                    if moves.carried.fresh_from is not None and moves.carried.fresh_from.ref() is self_:
                        return result
                    moves.carried.fresh = None
                guarded(self._scaled, self_, result)
            return result

        return scale

    def _scaled(self, scaler: Any, result: Any) -> None:
        self._witness.close_window()
        of = self._witness.moves.watches.scaler(scaler)
        if of.is_enabled:
            if not of.uses:
                self._witness.habits.first_use(of)
                of.driver = framework_in(sys._getframe(1))
            if compat.in_functorch():  # the result is gone when the transform ends, and no backward pass will be seen
                of.uses += 1
                return
            self._witness.moves.scaled(of, result)

    def _watch_update(self, original: Call) -> Call:
        witness, moves = self._witness, self._witness.moves
        guarded, recorder, training, routine = witness.guarded, witness.recorder, witness.training, moves.routine

        @functools.wraps(original)
        def update(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.active or (get_ident() != training.ident and not guarded(training.hears)):
                return original(self_, *args, **kwargs)
            if recorder.paused:
                guarded(training.missed)
                return original(self_, *args, **kwargs)
            of = moves.watches.by_id.get(id(self_)) or guarded(moves.watches.scaler, self_)
            if of is None or not of.is_enabled:
                return original(self_, *args, **kwargs)
            if routine.is_on:
                frame = sys._getframe(1)
                if routine.matches(("update", of, frame.f_code, frame.f_lasti)):
                    of.scale = moves.carried.fresh = None
                    try:
                        return original(self_, *args, **kwargs)
                    except Exception as error:
                        guarded(moves.refusals.refused, "update", self_, None, error, frame)
                        raise
            if witness.own_updates.is_open:
                guarded(witness.own_updates.settle)
            if moves.machine.open:
                guarded(moves.before_update, of)
            try:
                result = original(self_, *args, **kwargs)
            except Exception as error:
                guarded(moves.refusals.refused, "update", self_, None, error, sys._getframe(1))
                raise
            guarded(moves.updated, of, sys._getframe(1))
            return result

        return update
