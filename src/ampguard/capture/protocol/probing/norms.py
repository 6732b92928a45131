"""The probes of gradient norms and of clipping."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch.nn.utils import clip_grad

from ampguard import compat
from ampguard.capture.protocol.moves import Frame
from ampguard.capture.protocol.probing.witness import Call, Witness
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.protocol.sums import is_written

OF_NORMS = 8.0
"""By which factor a norm may be above a limit that was computed of the norms before it (a percentile, a running mean)."""

NORM_LOOKS = 4
"""How often it is looked at what becomes of a norm that is computed at one place."""


class NormProbe:
    """Tells the moves that gradients were measured or clipped, and with which limit."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._looks: dict[Any, int] = {}
        self._has_limit_of_norms = False
        """Whether it was told that the script clips by norms of scaled gradients."""

    def install(self) -> None:
        witness = self._witness
        found = compat.total_norm_function()
        places: list[tuple[Any, str]] = [found] if found is not None else [(clip_grad, "clip_grad_norm_")]
        if hasattr(torch.nn.utils, "get_total_norm"):
            places.append((torch.nn.utils, "get_total_norm"))
        for owner, name in places:
            witness.patches.replace(owner, name, self._measuring(compat.clipping_limit))
        for owner in (clip_grad, torch.nn.utils):
            witness.patches.replace(owner, "clip_grad_value_", self._measuring(lambda: 0.0))
        clipping = witness.noting(before=self._before_clipping, after=self._after_clipping, of_gradients=True)
        for owner in (clip_grad, torch.nn.utils):
            witness.patches.replace(owner, "clip_grad_norm_", clipping)
            witness.patches.replace(owner, "clip_grad_value_", clipping)

        if hasattr(torch.nn.utils, "clip_grads_with_norm_"):
            limiting = self._limiting
            witness.patches.replace(
                torch.nn.utils, "clip_grads_with_norm_", lambda original: limiting(clipping(original))
            )

    def _limiting(self, original: Call) -> Call:
        """Clipping by a norm that was computed before: is the scale in it still?"""
        witness = self._witness

        @functools.wraps(original)
        def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if witness.window.is_open and not torch.compiler.is_compiling():
                parameters = parameters if isinstance(parameters, torch.Tensor) else list(parameters)
                if witness.window.is_scaled(total_norm):
                    witness.guarded(self._clipped, parameters, float(max_norm), sys._getframe(1), True)
            return original(parameters, max_norm, total_norm, *args, **kwargs)

        return clip

    def _before_clipping(self, frame: Frame, *given: Any) -> None:
        moves = self._witness.moves
        if moves.machine.scaled or moves.close.settles:
            moves.close.before_clipping()
        if moves.close.own_scale.is_open and not moves.looks_closely:
            moves.close.own_scale.forget()
        elif moves.close.own_scale.is_open:
            moves.close.own_scale.before_clip(moves.mine())

    def _after_clipping(self, frame: Frame, *given: Any) -> None:
        moves = self._witness.moves
        if moves.machine.scaled or moves.close.settles:
            moves.close.after_clipping()
        if moves.close.own_scale.is_open and given:
            limit = given[1] if len(given) > 1 and isinstance(given[1], (int, float)) else None
            moves.close.own_scale.after_clip(moves.mine(), limit, script_line(frame))

    def _measuring(self, limit: Callable[[], float | None]) -> Callable[[Call], Call]:
        witness = self._witness
        guarded, recorder, training = witness.guarded, witness.recorder, witness.training
        machine, routine, close = witness.moves.machine, witness.moves.routine, witness.moves.close

        def watch(original: Call) -> Call:
            @functools.wraps(original)
            def measure(tensors: Any, *args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling():
                    return original(tensors, *args, **kwargs)
                if get_ident() != training.ident and not guarded(training.hears):
                    return original(tensors, *args, **kwargs)
                if recorder.paused or not recorder.active:
                    return original(tensors, *args, **kwargs)
                frame = sys._getframe(1)
                move = ("norm", frame.f_code, frame.f_lasti)
                if routine.is_on:
                    if routine.matches(move):
                        return original(tensors, *args, **kwargs)
                    if machine.scaled:  # as was not known while the routine was on
                        guarded(close.before_clipping)
                routine.note(move, None)
                if close.settles:
                    guarded(close.settle_all)
                if not machine.scaled:
                    norm = original(tensors, *args, **kwargs)
                    if witness.moves.read_scaled is not None and not self._has_limit_of_norms:
                        guarded(self._clipped_by_scaled_norm, guarded(limit), norm, frame)
                    return norm
                if not isinstance(tensors, torch.Tensor):
                    tensors = list(tensors)
                at_most = guarded(limit)
                is_limit = at_most is not None and at_most != float("inf")
                if at_most is not None and is_limit and is_written(at_most):
                    guarded(self._clipped, tensors, at_most, frame)
                    return original(tensors, *args, **kwargs)
                norm = original(tensors, *args, **kwargs)
                if is_limit:
                    guarded(self._clipped_by_number, tensors, at_most, norm, frame)
                else:
                    guarded(self._was_read, tensors, norm, frame)
                return norm

            return measure

        return watch

    def _clipped_by_number(self, tensors: Any, at_most: float, norm: Any, frame: Frame) -> None:
        """With a limit that was computed. One as large as the norms themselves was computed of them, and carries the scale."""
        may_carry_scale = self._witness.window.may_carry_scale(at_most) and not self._witness.moves.scale_was_read
        if not (may_carry_scale and float(norm) < at_most * OF_NORMS):
            self._clipped(tensors, at_most, frame)

    def _clipped_by_scaled_norm(self, at_most: float | None, norm: Any, frame: Frame) -> None:
        """True gradients are clipped with a limit that was computed of norms of scaled ones: nothing is ever clipped.

        It is where it was computed, is far above the norm, and is about the norm once the scale is taken out of it.
        """
        moves = self._witness.moves
        read = moves.read_scaled
        if read is None or at_most is None or not math.isfinite(at_most) or is_written(at_most) or moves.scale_was_read:
            return
        scale, size = read.factor or 1.0, float(norm)
        if not (scale > OF_NORMS**2 and 0.0 < size < at_most / OF_NORMS and at_most / scale < size * OF_NORMS):
            return
        facts = {"clips": False, "scale": scale, "limit": at_most, "norm": size, "limits_at": script_line(frame)}
        self._has_limit_of_norms = True
        moves.tell([dataclasses.replace(read, facts=facts)], moves.recorder.steps.count)

    def _clipped(self, tensors: Any, at_most: float, frame: Frame, norm_is_given: bool = False) -> None:
        moves, window = self._witness.moves, self._witness.window
        if not moves.scale_was_read and not window.limit_knows_scale(at_most):
            moves.norms.measured(tensors, True, frame, norm_is_given)
        if window.is_open:
            window.close(tell=False)

    def _was_read(self, tensors: Any, norm: Any, frame: FrameType) -> None:
        """A norm of scaled gradients was computed: what does the script do with it?"""
        window = self._witness.window
        whose = self._witness.moves.norms.whose(tensors)
        place = (frame.f_code, frame.f_lasti)
        looks = self._looks.get(place, 0)
        if whose and not window.is_open and looks < NORM_LOOKS:
            self._looks[place] = looks + 1
            window.open()
        for watch in whose[:1]:
            window.track(norm, watch, script_line(frame))
