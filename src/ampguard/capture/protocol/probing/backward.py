"""The probe of backward calls."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

import torch

from ampguard import compat
from ampguard.capture.frames import user_frame
from ampguard.capture.protocol.added import wants
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.probing.witness import Call, Witness
from ampguard.capture.protocol.script_lines import script_line

MAX_PLACES = 32
FIRST_LOOKS = 8
"""Backward calls of a run before which everything is looked at."""


class BackwardProbe:
    """Tells the moves of each call of `torch.autograd.backward`."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._looks = 0
        self._places: set[tuple[CodeType, int]] = set()
        """Where `torch.autograd.grad` was called."""

    def install(self) -> None:
        witness = self._witness
        guarded, recorder, training = witness.guarded, witness.recorder, witness.training
        moves, routine, dropped, scans = witness.moves, witness.moves.routine, witness.dropped, witness.scans

        def watch(original: Call) -> Call:
            @functools.wraps(original)
            def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
                if not recorder.active or torch.compiler.is_compiling():
                    return original(tensors, grad_tensors, *args, **kwargs)
                me = get_ident()
                if me != training.ident and not guarded(training.follows):
                    return original(tensors, grad_tensors, *args, **kwargs)
                if recorder.paused:
                    guarded(training.missed)
                    return original(tensors, grad_tensors, *args, **kwargs)
                frame = user_frame(sys._getframe(1))
                dropped.waiting += 1
                if routine.is_on and self._is_usual(tensors):
                    result = original(tensors, grad_tensors, *args, **kwargs)
                    if me == training.ident and routine.is_on:
                        guarded(moves.usual_backward.ended, frame)
                    if scans.asked and me == training.ident:
                        guarded(scans.after_backward)
                    return result
                guarded(self._before, tensors, grad_tensors, frame)
                result = original(tensors, grad_tensors, *args, **kwargs)
                if me == training.ident:
                    guarded(self._after, frame)
                    if scans.asked:
                        guarded(scans.after_backward)
                return result

            return backward

        witness.patches.replace(torch.autograd, "backward", watch)
        witness.patches.replace(torch.autograd, "grad", self._watch_grad)

    def _watch_grad(self, original: Call) -> Call:
        witness, moves = self._witness, self._witness.moves
        recorder, training = witness.recorder, witness.training

        @functools.wraps(original)
        def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not moves.watches.has_scaler or not recorder.active or recorder.paused or compat.in_functorch():
                return original(outputs, inputs, grad_outputs, *args, **kwargs)  # (tensors of a transform end with it)
            if not witness.guarded(self._looks_at, sys._getframe(1)):
                return original(outputs, inputs, grad_outputs, *args, **kwargs)
            inputs = list(inputs) if isinstance(inputs, Iterator) else inputs
            if witness.own_updates.is_open and (get_ident() == training.ident or not training.ident):
                witness.guarded(self._next_grad)
            step = recorder.steps.count
            if moves.carried.taken.are_there:
                witness.guarded(moves.carried.taken.carried_by, outputs)  # before its graph is gone
            results = original(outputs, inputs, grad_outputs, *args, **kwargs)
            if get_ident() == training.ident or not training.ident:
                frame = sys._getframe(1)
                if moves.machine.scaled and wants(inputs):
                    witness.guarded(moves.close.differentiated, outputs, grad_outputs, inputs, results, frame)
                witness.guarded(moves.close.taken, outputs, grad_outputs, inputs, results, frame)
                witness.guarded(moves.penalties.differentiated, outputs, grad_outputs, results, script_line(frame))
                scale = witness.guarded(self._scale_of, outputs, grad_outputs)
                if scale is not None and not witness.own_updates.is_open:
                    witness.guarded(self._own_update_may_follow, inputs, results, scale, script_line(frame), step)
                witness.guarded(witness.window.open)
                witness.guarded(witness.window.taken, inputs, results, scale is not None, script_line(frame))
            return results

        return grad

    def _looks_at(self, frame: FrameType) -> bool:
        """Whether a call of `torch.autograd.grad` is looked at: so is the first one from each place, whenever it comes."""
        moves, place = self._witness.moves, (frame.f_code, frame.f_lasti)
        if (
            place not in self._places
            and len(self._places) < MAX_PLACES
            and self._witness.training.ident in (0, get_ident())
        ):
            self._places.add(place)
            if not moves.looks_closely:
                moves.second_looks.ask(*moves.mine())
                if moves.routine.is_on:
                    moves.routine.leave()
        return moves.looks_closely

    def _next_grad(self) -> None:
        """The script goes on to the next gradients."""
        self._witness.own_updates.settle()

    def _scale_of(self, outputs: Any, given: Any) -> float | None:
        scale, _ = self._witness.moves.carried.scale_of(outputs, given)
        return None if scale is None else float(scale)

    def _own_update_may_follow(self, *of_grad: Any) -> None:
        """Gradients of a scaled loss were returned: the script may move weights along them itself."""
        self._witness.own_updates.after_grad(*of_grad)

    def _is_usual(self, tensors: Any) -> bool:
        moves, guarded = self._witness.moves, self._witness.guarded
        if self._witness.kept.kept:
            guarded(self._witness.kept.glance, tensors)
        if moves.looks_closely and moves.routine.is_before_backward:
            guarded(moves.routine.leave)
            return False
        return bool(guarded(moves.usual_backward.begins, tensors))

    def _before(self, tensors: Any, gradients: Any, frame: FrameType) -> None:
        moves = self._witness.moves
        if self._witness.joined.are_there:
            self._witness.joined.before_backward(frame)
        if self._witness.own_updates.is_open:
            self._witness.own_updates.settle()
        if moves.looks_closely or self._looks < FIRST_LOOKS:
            self._witness.window.close()
            self._looks += 1
            moves.watches.join_wrapped()
            self._witness.models.look()
        if not self._witness.piled.is_over:
            self._witness.piled.before_backward(tensors)
        kept = self._witness.kept
        if kept.kept and not moves.looks_closely:
            kept.glance(tensors)
        if kept.kept and moves.looks_closely:
            kept.before_backward(tensors, gradients, frame)
        moves.before_backward(tensors, gradients, frame)
        if moves.looks_closely and moves.close.has_hooks and moves.is_scaled:
            self._witness.window.before_hooks()

    def _may_be_for_no_step(self, reached: tuple[OptimizerWatch, ...]) -> None:
        """Gradients are made and cleared, again and again, as never before in this run: what for?"""
        machine = self._witness.moves.machine
        if any(machine.ledger(watch).is_wasteful for watch in reached):
            self._witness.moves.second_looks.ask(*reached)

    def _after(self, frame: FrameType) -> None:
        witness = self._witness
        knows_scale = witness.window.behind_hooks()
        reached = witness.moves.after_backward(frame)
        if not witness.piled.is_over:
            witness.piled.after_backward()
        if not witness.piled_in_masters.is_over:
            place = witness.moves.machine.last_backward
            witness.piled_in_masters.after_backward(reached, place.where if place is not None else None)
        if witness.habits.watches_regions:
            witness.habits.differentiated(reached)
        last = witness.moves.machine.last_backward
        if last is not None and last.scale is not None and not witness.moves.looks_closely:
            self._may_be_for_no_step(reached)
        if witness.moves.looks_closely and last is not None and last.scale is not None:
            witness.own_updates.after_backward(float(last.scale), last.where)
        if witness.window.is_open:
            witness.window.goes_on(knows_scale)
        elif witness.moves.looks_closely and (
            witness.moves.machine.scaled or witness.own_updates.is_open or (reached and witness.moves.scales)
        ):
            witness.window.open()
