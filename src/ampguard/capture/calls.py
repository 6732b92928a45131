"""The probes of the protocol: the calls of a training loop, wrapped while the guard is on and put back after it.

They lie on top of the recorder's own probes. Inside a root module, a backward pass or an investigation
(`recorder.paused`) nothing is noted. A healthy step takes the shortest way through each wrapper.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, lr_scheduler

from ampguard import compat
from ampguard.capture.probes import Patches
from ampguard.capture.protocol.dropped import DroppedGradients
from ampguard.capture.protocol.functional import FunctionalTraining
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.habits import Habits
from ampguard.capture.protocol.models import Models
from ampguard.capture.protocol.moves import BreachListener, Frame, Moves
from ampguard.capture.protocol.reads import ReadWindow
from ampguard.capture.protocol.scans import Scans, is_time_to_look
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.protocol.watches import ScalerWatch
from ampguard.capture.recorder import FlightRecorder
from ampguard.protocol.events import Clear

Call = Callable[..., Any]
REGION_STEPS = 8
NORM_LOOKS = 4
"""How often it is looked at what becomes of a norm that is computed at one place."""


class CallProbes:
    """All protocol probes of one recorder."""

    def __init__(self, recorder: FlightRecorder, listener: BreachListener) -> None:
        self._recorder = recorder
        self._guarded = recorder.barrier.call
        self._patches = Patches()
        self._handles: list[Any] = []
        self.moves = Moves(recorder, listener)
        self.training = self.moves.training
        self.models = Models(recorder)
        self.scans = Scans(self.moves, self.models)
        self.habits = Habits(self.moves, self.models)
        self.window = ReadWindow(self.moves, self._guarded)
        self.dropped = DroppedGradients(recorder, self.moves)
        self.functional = FunctionalTraining(recorder, self._guarded)
        self._looks = 0
        self._norm_looks: dict[Any, int] = {}
        self.moves.explain = self.scans.explain_refusal

    def install(self) -> None:
        """Begin to observe; after the recorder's probes."""
        self._watch_backward()
        self._watch_scaling()
        self._watch_scaler_steps()
        self._watch_optimizers()
        self._watch_norms()
        self._watch_schedulers()
        self._watch_autocast()
        place = compat.functional_gradient()
        if place is not None:
            self._patches.replace(*place, self.functional.watch)
        habits = self.habits
        self._patches.replace(
            torch, "save", self._noting(before=lambda frame, obj, f=None: habits.saving(obj, f, frame))
        )

    def forward_begins(self) -> None:
        """A root module is about to be called, or the run ends: was the step of the last gradients passed over?"""
        if self.dropped.waiting >= self.dropped.usual and get_ident() == self.training.ident:
            self._guarded(self.dropped.look)

    def _passed_over(self) -> None:
        if self.dropped.waiting >= self.dropped.usual:
            self.dropped.look()

    def undo(self) -> None:
        """Put back every patched attribute."""
        self._guarded(self.window.close)
        self._patches.undo()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _noting(
        self, before: Call | None = None, after: Call | None = None, of_gradients: bool = False
    ) -> Callable[[Call], Call]:
        """Wrap a function that is called rarely: `before` and `after` get the caller's frame and the first arguments.

        `of_gradients`: it is about the gradients of whoever calls it, and followed only in the thread that trains.
        """
        guarded, recorder, window, training = self._guarded, self._recorder, self.window, self.training

        def watch(original: Call) -> Call:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                if not recorder.active:
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

    # --- backward -----------------------------------------------------------------------------------------------------

    def _watch_backward(self) -> None:
        guarded, recorder = self._guarded, self._recorder

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
                frame = sys._getframe(1)
                if frame.f_code is tensor_backward:
                    frame = frame.f_back or frame
                dropped.waiting += 1
                if routine.is_on and self._is_usual(tensors):
                    result = original(tensors, grad_tensors, *args, **kwargs)
                    if me == training.ident and routine.is_on:
                        guarded(moves.after_usual_backward, frame)
                    return result
                guarded(self._before_backward, tensors, grad_tensors)
                result = original(tensors, grad_tensors, *args, **kwargs)
                if me == training.ident:
                    guarded(self._after_backward, frame)
                return result

            return backward

        training = self.training
        moves, routine, dropped = self.moves, self.moves.routine, self.dropped
        tensor_backward = getattr(torch.Tensor.backward, "__code__", None)

        self._patches.replace(torch.autograd, "backward", watch)

    def _is_usual(self, tensors: Any) -> bool:
        moves = self.moves
        if moves.looks_closely and moves.routine.is_at_start:
            self._guarded(moves.routine.leave)
            return False
        return bool(self._guarded(moves.is_usual_backward, tensors))

    def _before_backward(self, tensors: Any, gradients: Any) -> None:
        moves = self.moves
        if moves.looks_closely or self._looks < 8:
            self.window.close()
            self._looks += 1
            moves.watches.join_wrapped()
            self.models.look()
        moves.before_backward(tensors, gradients)

    def _after_backward(self, frame: FrameType) -> None:
        moves = self.moves
        reached = moves.after_backward(frame)
        if self.habits.watches_regions:
            self.habits.differentiated(reached)
        if moves.looks_closely and moves.machine.scaled:
            self.window.open()

    # --- the scaler ---------------------------------------------------------------------------------------------------

    def _watch_scaling(self) -> None:
        kind, replace = torch.amp.GradScaler, self._patches.replace
        guarded, recorder, moves = self._guarded, self._recorder, self.moves
        routine, training = moves.routine, self.training

        def watch_scale(original: Call) -> Call:
            @functools.wraps(original)
            def scale(self_: Any, outputs: Any) -> Any:
                result = original(self_, outputs)
                if get_ident() != training.ident and not guarded(training.hears):
                    return result
                if recorder.paused:
                    guarded(training.missed)
                elif recorder.active:
                    if routine.is_on and moves.fresh is None and type(result) is torch.Tensor:
                        moves.fresh = result  # by the scaler that scales in every iteration, or the backward will tell
                        if moves.fresh_from is not None and moves.fresh_from.ref() is self_:
                            return result
                        moves.fresh = None
                    guarded(self._scaled, self_, result)
                return result

            return scale

        def watch_update(original: Call) -> Call:
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
                        of.scale = moves.fresh = None
                        return original(self_, *args, **kwargs)
                if moves.machine.open:
                    guarded(moves.before_update, of)
                try:
                    result = original(self_, *args, **kwargs)
                except Exception as error:
                    guarded(moves.refused, "update", self_, None, error, sys._getframe(1))
                    raise
                guarded(moves.updated, of, sys._getframe(1))
                return result

            return update

        def read(frame: Frame, scaler: Any) -> None:
            moves.scale_was_read = True

        replace(kind, "__init__", self._noting(after=lambda frame, scaler, *_: moves.scaler_created(scaler, frame)))
        replace(kind, "scale", watch_scale)
        replace(kind, "update", watch_update)
        replace(kind, "load_state_dict", self._noting(after=lambda frame, scaler, *_: moves.loaded(scaler)))
        replace(kind, "state_dict", self._noting(before=lambda frame, scaler: self.habits.state_asked(scaler)))
        replace(kind, "get_scale", self._unclosing(read))

    def _unclosing(self, before: Call) -> Callable[[Call], Call]:
        """As `_noting`, for a call between computing a norm and using it."""
        guarded, recorder, training = self._guarded, self._recorder, self.training

        def watch(original: Call) -> Call:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                if recorder.active and not recorder.paused and (get_ident() == training.ident or not training.ident):
                    guarded(before, None, *args)
                return original(*args, **kwargs)

            return call

        return watch

    def _scaled(self, scaler: Any, result: Any) -> None:
        if self.window.is_open:
            self.window.close()
        of = self.moves.watches.scaler(scaler)
        if of.is_enabled:
            if not of.uses:
                self.habits.first_use(of)
            self.moves.scaled(of, result)

    def _watch_scaler_steps(self) -> None:
        guarded, recorder, moves = self._guarded, self._recorder, self.moves
        routine, by_id, training = moves.routine, moves.watches.by_id, self.training

        def watch_unscale(original: Call) -> Call:
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
                    if routine.matches(("unscale", of, watch, frame.f_code, frame.f_lasti)):
                        return original(self_, optimizer)
                guarded(self._before_unscale, self_, optimizer, sys._getframe(1))
                try:
                    result = original(self_, optimizer)
                except Exception as error:
                    guarded(moves.refused, "unscale_", self_, optimizer, error, sys._getframe(1))
                    raise
                guarded(moves.unscaled, self_, optimizer, sys._getframe(1))
                return result

            return unscale_

        def watch_step(original: Call) -> Call:
            @functools.wraps(original)
            def step(self_: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                if not recorder.active or (get_ident() != training.ident and not guarded(training.hears, optimizer)):
                    return original(self_, optimizer, *args, **kwargs)
                if recorder.paused or moves.stepping is not None:
                    guarded(training.missed)
                    return original(self_, optimizer, *args, **kwargs)
                if routine.is_on and id(self_) in by_id and id(optimizer) in by_id:
                    of, watch, frame = by_id[id(self_)], by_id[id(optimizer)], sys._getframe(1)
                    if routine.matches(("step", of, watch, frame.f_code, frame.f_lasti)):
                        moves.attempt = recorder.steps.count
                        watch.stepped = False
                        moves.stepping = (of, watch, None)
                        try:
                            return original(self_, optimizer, *args, **kwargs)
                        finally:
                            moves.stepping = None
                            self._stepped_as_usual(of, watch)
                guarded(self._before_scaler_step, self_, optimizer, sys._getframe(1))
                try:
                    result = original(self_, optimizer, *args, **kwargs)
                except BaseException as error:
                    moves.stepping = None
                    if isinstance(error, Exception):
                        guarded(moves.refused, "step", self_, optimizer, error, sys._getframe(1))
                    raise
                if moves.stepping is not None:
                    guarded(self._after_scaler_step, self_, optimizer)
                    moves.stepping = None
                return result

            return step

        self._patches.replace(torch.amp.GradScaler, "unscale_", watch_unscale)
        self._patches.replace(torch.amp.GradScaler, "step", watch_step)

    def _before_unscale(self, scaler: Any, optimizer: Any, frame: Frame) -> None:
        if self.window.is_open:
            self.window.close()
        self.moves.before_unscale(scaler, optimizer, frame)

    def _before_scaler_step(self, scaler: Any, optimizer: Any, frame: Frame) -> None:
        if self.window.is_open:
            self.window.close()
        self.moves.before_scaler_step(scaler, optimizer, frame)

    def _after_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        self.dropped.stepped()
        of, watch = self.moves.after_scaler_step(scaler, optimizer)
        self._stepped(watch)
        if of.is_enabled:
            self.habits.after_scaler_step(of, watch)

    def _stepped_as_usual(self, of: ScalerWatch, watch: OptimizerWatch) -> None:
        self.dropped.stepped()
        of.steps += 1
        steps = watch.steps = watch.steps + 1
        watch.taken += watch.stepped
        watch.was_skipped = not watch.stepped
        if steps & (steps - 1) == 0 or watch.candidates or watch.lost_one or self.habits.has_saved:
            self._guarded(self._stepped, watch)
            if self.habits.suspects_scaler:
                self._guarded(self.habits.after_scaler_step, of, watch)

    def _stepped(self, watch: OptimizerWatch) -> None:
        habits, steps = self.habits, watch.steps
        if habits.watches_regions:
            habits.stepped(watch)
            habits.watches_regions = steps < REGION_STEPS or habits.suspects_scaler
        self.scans.after_step(watch)
        habits.tick()
        if self.moves.looks_closely or is_time_to_look(steps):
            self.moves.looks_closely = any(is_time_to_look(w.steps) for w in self.moves.mine())

    # --- optimizers ---------------------------------------------------------------------------------------------------

    def _watch_optimizers(self) -> None:
        guarded, recorder, moves, dropped = self._guarded, self._recorder, self.moves, self.dropped
        routine, training = moves.routine, self.training

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if get_ident() != training.ident and not guarded(training.hears, optimizer):
                return
            if moves.stepping is not None:
                moves.stepping[1].stepped = True
            elif recorder.paused:
                guarded(training.missed)
            elif recorder.active:
                guarded(self._before_direct_step, optimizer)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if get_ident() != training.ident and not guarded(training.hears, optimizer):
                return
            dropped.stepped()
            if moves.stepping is None and recorder.active and not recorder.paused:
                guarded(self._after_direct_step, optimizer, sys._getframe(1))

        def watch_clear(original: Call) -> Call:
            @functools.wraps(original)
            def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                if get_ident() != training.ident and not guarded(training.hears, optimizer):
                    return original(optimizer, *args, **kwargs)
                if dropped.waiting >= dropped.usual and recorder.active and not recorder.paused:
                    guarded(dropped.look)
                result = original(optimizer, *args, **kwargs)
                if recorder.paused:
                    guarded(training.missed)
                elif recorder.active:
                    watch = moves.watches.by_id.get(id(optimizer))
                    if routine.is_on and watch is not None:
                        frame = sys._getframe(1)
                        if routine.matches(("clear", watch, frame.f_code, frame.f_lasti)):
                            return result
                    if watch is None or watch.thread != training.ident or not moves.machine.clear(watch):
                        guarded(self._cleared, optimizer, sys._getframe(1))
                    else:
                        frame = sys._getframe(1)
                        routine.note(("clear", watch, frame.f_code, frame.f_lasti), Clear(watch))
                return result

            return zero_grad

        def watch_register(original: Call) -> Call:
            @functools.wraps(original)
            def register_parameter(module: nn.Module, *args: Any, **kwargs: Any) -> None:
                for watch in moves.watches.optimizers:  # a layer is made while others train: perhaps it replaces one
                    watch.lost_one = watch.steps > 0
                original(module, *args, **kwargs)

            return register_parameter

        add_before, add_after = compat.optimizer_step_hooks()
        self._handles += [add_before(before), add_after(after)]
        replace, habits = self._patches.replace, self.habits
        replace(Optimizer, "__init__", self._noting(after=lambda frame, opt, *_: moves.created(opt, frame)))
        replace(Optimizer, "zero_grad", watch_clear)
        loaded = self._noting(after=lambda frame, opt, state=None: habits.optimizer_loaded(opt, state, frame))
        replace(Optimizer, "load_state_dict", loaded)
        replace(nn.Module, "register_parameter", watch_register)
        passed_over, cleared = self._passed_over, moves.cleared_by_module
        clear = self._noting(
            before=lambda frame, *_: passed_over(), after=lambda frame, *_: cleared(frame), of_gradients=True
        )
        replace(nn.Module, "zero_grad", clear)

    def _before_direct_step(self, optimizer: Optimizer) -> None:
        if self.window.is_open:
            self.window.close()
        self.moves.before_direct_step(optimizer)

    def _after_direct_step(self, optimizer: Optimizer, frame: Frame) -> None:
        self._stepped(self.moves.after_direct_step(optimizer, frame))

    def _cleared(self, optimizer: Optimizer, frame: Frame) -> None:
        if self.window.is_open:
            self.window.close()
        self.moves.cleared(optimizer, frame)

    # --- norms --------------------------------------------------------------------------------------------------------

    def _watch_norms(self) -> None:
        found = compat.total_norm_function()
        places: list[tuple[Any, str]] = [found] if found is not None else [(clip_grad, "clip_grad_norm_")]
        if hasattr(torch.nn.utils, "get_total_norm"):
            places.append((torch.nn.utils, "get_total_norm"))
        for owner, name in places:
            self._patches.replace(owner, name, self._measuring(compat.clipping_limit))
        for owner in (clip_grad, torch.nn.utils):
            self._patches.replace(owner, "clip_grad_value_", self._measuring(lambda: 0.0))
        moves = self.moves
        around = self._noting(
            before=lambda frame, *_: moves.before_clipping() if moves.machine.scaled else None,
            after=lambda frame, *_: moves.after_clipping() if moves.machine.scaled else None,
            of_gradients=True,
        )
        for owner in (clip_grad, torch.nn.utils):
            self._patches.replace(owner, "clip_grad_norm_", around)
            self._patches.replace(owner, "clip_grad_value_", around)

    def _measuring(self, limit: Callable[[], float | None]) -> Callable[[Call], Call]:
        guarded, recorder, machine = self._guarded, self._recorder, self.moves.machine
        routine, training = self.moves.routine, self.training

        def clipped(tensors: Any, at_most: float, frame: Frame) -> None:
            if not self.moves.scale_was_read and not self.window.limit_knows_scale(at_most):
                self.moves.measured(tensors, True, frame)
            if self.window.is_open:
                self.window.close(tell=False)

        def watch(original: Call) -> Call:
            @functools.wraps(original)
            def measure(tensors: Any, *args: Any, **kwargs: Any) -> Any:
                if get_ident() != training.ident and not guarded(training.hears):
                    return original(tensors, *args, **kwargs)
                if routine.is_on and recorder.active and not recorder.paused:
                    frame = sys._getframe(1)
                    if routine.matches(("norm", frame.f_code, frame.f_lasti)):
                        return original(tensors, *args, **kwargs)
                if recorder.active and not recorder.paused:
                    frame = sys._getframe(1)
                    routine.note(("norm", frame.f_code, frame.f_lasti), None)
                if machine.scaled and recorder.active and not recorder.paused:
                    if not isinstance(tensors, torch.Tensor):
                        tensors = list(tensors)
                    at_most = guarded(limit)
                    if at_most is not None and at_most != float("inf"):
                        guarded(clipped, tensors, at_most, sys._getframe(1))
                    else:
                        norm = original(tensors, *args, **kwargs)
                        guarded(self._norm_read, tensors, norm, sys._getframe(1))
                        return norm
                return original(tensors, *args, **kwargs)

            return measure

        return watch

    def _norm_read(self, tensors: Any, norm: Any, frame: FrameType) -> None:
        """A norm of scaled gradients was computed: what does the script do with it?"""
        whose = self.moves.whose(tensors)
        place = (frame.f_code, frame.f_lasti)
        looks = self._norm_looks.get(place, 0)
        if whose and not self.window.is_open and looks < NORM_LOOKS:
            self._norm_looks[place] = looks + 1
            self.window.open()
        for watch in whose[:1]:
            self.window.track(norm, watch, script_line(frame))

    # --- schedulers and autocast --------------------------------------------------------------------------------------

    def _watch_schedulers(self) -> None:
        guarded, recorder, habits, training = self._guarded, self._recorder, self.habits, self.training
        kinds = [k for k in vars(lr_scheduler).values() if isinstance(k, type) and "step" in vars(k)]
        depth = [0]

        def watch(original: Call) -> Call:
            @functools.wraps(original)
            def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
                initial = compat.is_first_move(scheduler)
                if depth[0] or initial or recorder.paused or not recorder.active:
                    return original(scheduler, *args, **kwargs)
                if get_ident() != training.ident and not guarded(training.hears):
                    return original(scheduler, *args, **kwargs)
                depth[0] += 1
                try:
                    result = original(scheduler, *args, **kwargs)
                finally:
                    depth[0] -= 1
                guarded(habits.scheduler_moved, scheduler, sys._getframe(1))
                return result

            return step

        for kind in dict.fromkeys(k for k in kinds if issubclass(k, lr_scheduler.LRScheduler)):
            self._patches.replace(kind, "step", watch)

    def _watch_autocast(self) -> None:
        guarded, recorder, habits, window = self._guarded, self._recorder, self.habits, self.window
        training = self.training

        def watch_enter(original: Call) -> Call:
            @functools.wraps(original)
            def __enter__(region: Any) -> Any:  # noqa: N807
                if (habits.watches_regions or window.is_open) and recorder.active:
                    guarded(entered, region, sys._getframe(1))
                return original(region)

            return __enter__

        def entered(region: Any, frame: Frame) -> None:
            if torch.compiler.is_compiling() or (get_ident() != training.ident and not training.hears()):
                return
            window.close()
            habits.entered_autocast(region, frame)

        def watch_clear(original: Call) -> Call:
            @functools.wraps(original)
            def clear_autocast_cache() -> None:
                original()
                recorder.regions += 1
                is_ours = get_ident() == training.ident or guarded(training.hears)
                if is_ours and habits.watches_regions and not recorder.paused:
                    guarded(habits.cache_cleared)

            return clear_autocast_cache

        self._patches.replace(torch.amp.autocast_mode.autocast, "__enter__", watch_enter)
        self._patches.replace(torch, "clear_autocast_cache", watch_clear)
