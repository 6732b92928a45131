"""The probes of optimizers: made, stepped without a scaler, cleared, loaded."""

from __future__ import annotations

import functools
import sys
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.frames import user_line
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.moves import Frame
from ampguard.capture.protocol.own_steps import Arguments
from ampguard.capture.protocol.probing.witness import Call, Witness
from ampguard.capture.protocol.scans import LOOKS
from ampguard.capture.protocol.script_lines import script_line
from ampguard.protocol.events import Clear


class OptimizerProbe:
    """Tells the moves what becomes of an optimizer's gradients outside a scaler's own calls."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._may_be_own = witness.own_steps.are_own.get

    @property
    def _is_followed(self) -> bool:
        recorder = self._witness.recorder
        return recorder.active and not recorder.paused

    def install(self) -> None:
        witness = self._witness
        replace, noting = witness.patches.replace, witness.noting
        add_before, add_after = compat.optimizer_step_hooks()
        witness.handles += [add_before(self._before_step), add_after(self._after_step)]
        on_registration = compat.module_registration_hook()
        if on_registration is not None:
            witness.handles.append(on_registration(self._registered))
        replace(Optimizer, "__init__", noting(after=self._made))
        replace(Optimizer, "zero_grad", self._watch_clear)
        replace(Optimizer, "load_state_dict", noting(after=self._loaded))
        replace(Optimizer, "add_param_group", noting(after=self._joined))
        replace(nn.Module, "register_parameter", self._watch_register)
        replace(nn.Module, "__setstate__", self._watch_restored)
        replace(nn.Module, "zero_grad", self._watch_module_clear)

    def _registered(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        self._witness.guarded(self._witness.moves.put_in.registered, module, sys._getframe(1))

    def _made(self, frame: Frame, optimizer: Optimizer, *_: Any) -> None:
        self._witness.moves.created(optimizer, frame)
        self._witness.unfrozen.built.optimizer_made(optimizer, frame)
        self._bring(optimizer, optimizer.param_groups, frame)

    def _loaded(self, frame: Frame, optimizer: Optimizer, state_dict: Any = None) -> None:
        self._witness.habits.optimizer_loaded(optimizer, state_dict, frame)
        self._witness.own_steps.loaded(optimizer, state_dict, script_line(frame))

    def _bring(self, optimizer: Optimizer, groups: list[dict[str, Any]], frame: Frame) -> None:
        if not self._witness.dropped.waiting:  # (else perhaps gradients of the iteration that is under way)
            self._witness.joined.joined(optimizer, [p for group in groups for p in group["params"]], frame)

    def _joined(self, frame: Frame, optimizer: Optimizer, group: Any = None) -> None:
        """Parameters join an optimizer that trains: those that stand for all of its parameters are chosen anew."""
        watch = self._witness.moves.watches.by_id.get(id(optimizer))
        if watch is not None:
            watch.lost_one = watch.steps > 0
            self._bring(optimizer, optimizer.param_groups[-1:], frame)
            self._witness.scans.still_frozen.joined(optimizer, optimizer.param_groups[-1]["params"], frame)

    def _passed_over(self, module: nn.Module, frame: Frame) -> None:
        dropped = self._witness.dropped
        if dropped.waiting >= dropped.usual:
            dropped.look(script_line(frame), module)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        witness, moves = self._witness, self._witness.moves
        if get_ident() != witness.training.ident and not witness.guarded(witness.training.hears, optimizer):
            return
        if self._may_be_own(type(optimizer), True) and witness.own_steps.is_own(optimizer) and self._is_followed:
            witness.guarded(witness.own_steps.before, optimizer)
        if witness.scans.asked:
            witness.guarded(witness.scans.before_step, optimizer)
        if not witness.piled_in_masters.is_over:
            witness.guarded(witness.piled_in_masters.before_step, optimizer, sys._getframe(1))
        if moves.stepping is not None:
            moves.stepping[1].stepped = True
        elif witness.recorder.paused:
            if moves.in_backward.is_open:
                witness.guarded(moves.in_backward.stepping, optimizer, sys._getframe(1))
            witness.guarded(witness.training.missed)
            witness.guarded(witness.recorder.drivers.trains, sys._getframe(1))
        elif witness.recorder.active:
            if moves.routine.is_on and not moves.scales:
                moves.attempt = witness.recorder.steps.count
                return
            witness.guarded(self._before_direct_step, optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        witness = self._witness
        if get_ident() != witness.training.ident and not witness.guarded(witness.training.hears, optimizer):
            return
        witness.dropped.stepped()
        if witness.moves.stepping is None and witness.recorder.active and not witness.recorder.paused:
            self._directly_stepped(optimizer, sys._getframe(1))
        if self._may_be_own(type(optimizer), True) and witness.own_steps.is_own(optimizer) and self._is_followed:
            witness.guarded(witness.own_steps.after, optimizer, Arguments(args[1:], kwargs), sys._getframe(1))

    def _directly_stepped(self, optimizer: Optimizer, frame: Frame) -> None:
        witness, moves = self._witness, self._witness.moves
        watch = moves.watches.by_id.get(id(optimizer))
        is_expected = moves.routine.is_on and not moves.scales
        if is_expected and watch is not None and moves.routine.matches(("direct step", watch, user_line(frame))):
            self._stepped_as_usual(watch)
            return
        witness.guarded(self._after_direct_step, optimizer, frame)

    def _stepped_as_usual(self, watch: OptimizerWatch) -> None:
        witness = self._witness
        steps = watch.steps = watch.steps + 1
        watch.taken += 1
        habits = witness.habits
        asks = watch.candidates or watch.lost_one or habits.saved_without is not None or habits.region is not None
        asks = asks or witness.recorder.gradients.cut is not None
        if asks or steps in LOOKS:
            witness.guarded(witness.stepped, watch)
        elif not steps & witness.unfrozen.mask or (witness.unfrozen.sample and witness.unfrozen.is_thawed()):
            witness.guarded(witness.unfrozen.look, watch)

    def _before_direct_step(self, optimizer: Optimizer) -> None:
        if self._witness.own_updates.is_open:
            self._witness.own_updates.before_optimizers()
        self._witness.close_window()
        self._witness.moves.before_direct_step(optimizer)

    def _after_direct_step(self, optimizer: Optimizer, frame: Frame) -> None:
        if self._witness.own_updates.is_open:
            self._witness.own_updates.stepped()
        self._witness.stepped(self._witness.moves.after_direct_step(optimizer, frame))

    def _watch_clear(self, original: Call) -> Call:
        witness, moves = self._witness, self._witness.moves
        guarded, recorder, training = witness.guarded, witness.recorder, witness.training
        routine, dropped = moves.routine, witness.dropped

        @functools.wraps(original)
        def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(optimizer, *args, **kwargs)
            if get_ident() != training.ident and not guarded(training.hears, optimizer):
                return original(optimizer, *args, **kwargs)
            if dropped.waiting >= dropped.usual and recorder.active and not recorder.paused:
                guarded(dropped.look, script_line(sys._getframe(1)), optimizer)
            result = original(optimizer, *args, **kwargs)
            if recorder.paused:
                guarded(training.missed)
            elif recorder.active:
                watch = moves.watches.by_id.get(id(optimizer))
                frame = sys._getframe(1)
                move = ("clear", watch, frame.f_code, frame.f_lasti)
                if routine.is_on and watch is not None and routine.matches(move):
                    return result
                if watch is None or watch.thread != training.ident or not moves.machine.clear(watch):
                    guarded(self._cleared, optimizer, frame)
                else:
                    routine.note(move, Clear(watch))
            return result

        return zero_grad

    def _watch_module_clear(self, original: Call) -> Call:
        witness, moves = self._witness, self._witness.moves
        guarded, recorder, training, window = witness.guarded, witness.recorder, witness.training, witness.window

        @functools.wraps(original)
        def zero_grad(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not recorder.active:
                return original(module, *args, **kwargs)
            is_other = get_ident() != training.ident
            if is_other and not guarded(training.hears):
                return original(module, *args, **kwargs)
            if recorder.paused:
                guarded(training.missed)
                return original(module, *args, **kwargs)
            if window.is_open and not is_other:
                guarded(window.close)
            guarded(self._passed_over, module, sys._getframe(1))
            result = original(module, *args, **kwargs)
            guarded(moves.cleared_by_module, module, sys._getframe(1))
            return result

        return zero_grad

    def _cleared(self, optimizer: Optimizer, frame: Frame) -> None:
        self._witness.close_window()
        self._witness.moves.cleared(optimizer, frame)

    def _watch_restored(self, original: Call) -> Call:
        """A module is copied (`copy.deepcopy`), or loaded as a whole: each of its parts is, the whole as the last."""
        watches, put_in, guarded = self._witness.moves.watches, self._witness.moves.put_in, self._witness.guarded

        @functools.wraps(original)
        def __setstate__(module: nn.Module, state: Any) -> None:  # noqa: N807
            original(module, state)
            if watches.optimizers:
                guarded(put_in.registered, module, sys._getframe(1))

        return __setstate__

    def _watch_register(self, original: Call) -> Call:
        watches, built = self._witness.moves.watches, self._witness.unfrozen.built
        put_in = self._witness.moves.put_in
        guarded = self._witness.guarded

        @functools.wraps(original)
        def register_parameter(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            for watch in watches.optimizers:  # a layer is made while others train: perhaps it replaces one
                watch.lost_one = watch.steps > 0
            original(module, *args, **kwargs)
            if watches.optimizers:
                parameter = kwargs.get("param", args[-1] if args else None)
                if isinstance(parameter, Tensor):
                    guarded(put_in.registered, parameter, sys._getframe(1))
                if built.is_open:
                    guarded(built.registered, parameter)

        return register_parameter
