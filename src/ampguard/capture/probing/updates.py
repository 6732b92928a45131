"""The probes of a scaler and of optimizers: what becomes of gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.patches import Patches
from ampguard.capture.probing.probe import Probe
from ampguard.capture.recorder import FlightRecorder

PLAIN_CLOSURES = (FunctionType, MethodType, functools.partial)
"""Those of which an optimizer can want nothing but to be called."""


class UpdateProbe(Probe):
    """Tells the recorder of scaled losses, of updates and of cleared gradients."""

    def __init__(self, recorder: FlightRecorder, patches: Patches) -> None:
        super().__init__(recorder, patches)
        self.handles: list[Any] = []
        self._scaling: list[Any] = []
        """The scalers whose `step` is running."""

    def install(self) -> None:
        self._watch_scaler()
        self._watch_optimizers()

    def _watch_scaler(self) -> None:
        recorder = self._recorder
        guarded = recorder.barrier.call
        scaling, turns = self._scaling, recorder.turns

        def watch_scale(original: Callable[..., Any]) -> Callable[..., Any]:
            is_torchs = getattr(original, "__module__", "") == torch.amp.grad_scaler.__name__

            @functools.wraps(original)
            def scale(self: Any, outputs: Any) -> Any:
                if not recorder.active or (turns.are_several and turns.passes_over()):
                    scaled = original(self, outputs)
                    recorder.captures.scaled(outputs, scaled, self)
                    return scaled

                if is_torchs and recorder.tape.is_on_stack:
                    scaled = recorder.tape.scale(original, self, outputs)
                else:
                    scaled = original(self, outputs)
                recorder.barrier.note(recorder.scaling.note, outputs, scaled, self)
                return scaled

            return scale

        def watch_step(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
                if not recorder.active or (turns.are_several and turns.passes_over()):
                    return original(scaler, optimizer, *args, **kwargs)
                before = recorder.steps.attempts
                if scaler.is_enabled():
                    guarded(recorder.before_update, optimizer, True)
                    if recorder.gradients.suspects_underflow:
                        guarded(self._look_for_underflow, scaler, optimizer)
                scaling.append(scaler)
                try:
                    result = original(scaler, optimizer, *args, **kwargs)
                finally:
                    scaling.pop()
                if recorder.steps.attempts == before:  # the optimizer's own hooks did not run: skipped, if it has any
                    is_skipped = isinstance(optimizer, Optimizer) or not guarded(
                        compat.let_step_unseen, scaler, optimizer
                    )
                    if is_skipped and not recorder.counting:
                        guarded(self._held_off, scaler, optimizer)
                    held_back = guarded(recorder.steps.behind, optimizer)
                    guarded(recorder.after_update, held_back if held_back is not None else optimizer, is_skipped)
                if not recorder.between_steps:  # another optimizer's loss may begin outside modules (else: `update`)
                    guarded(recorder.preprocessing.bookkeeping_done, False)
                return result

            return step

        self._patches.replace(compat.GRAD_SCALER, "scale", watch_scale)
        self._patches.replace(compat.GRAD_SCALER, "update", self._bookkeeping(is_last=False))
        self._patches.replace(compat.GRAD_SCALER, "step", watch_step)

    def _look_for_underflow(self, scaler: Any, optimizer: Optimizer) -> None:
        if not self._recorder.counting:
            self._recorder.gradients.look_for_underflow(optimizer, float(scaler.get_scale()))

    def _held_off(self, scaler: Any, optimizer: Optimizer) -> None:
        if scaler.is_enabled() and not self._recorder.counting:
            self._recorder.gradients.held_off(optimizer, float(scaler.get_scale()))

    def _watch_optimizers(self) -> None:
        recorder = self._recorder
        guarded = recorder.barrier.call
        scaling, turns = self._scaling, recorder.turns

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            if recorder.on_weights_change is not None:
                guarded(recorder.on_weights_change)
            if not recorder.active or (turns.are_several and turns.passes_over()):
                recorder.captures.steps(optimizer)
                return None
            closure = kwargs.get("closure") if len(args) < 2 else args[1]
            scaler = scaling[-1] if scaling and scaling[-1].is_enabled() else None
            if scaler is None:
                follows = isinstance(closure, PLAIN_CLOSURES)
                guarded(recorder.before_update, optimizer, False, closure is not None, follows)
                if follows:
                    return _with_closure(args, kwargs, self._followed(closure, optimizer))
            elif compat.FOUND_INF in optimizer.__dict__ and compat.is_told_to_skip(optimizer):
                # a fused one skips by itself
                guarded(self._held_off, scaler, optimizer)
            return None

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if recorder.active and not (turns.are_several and turns.passes_over()):
                guarded(recorder.after_update, optimizer)
                if recorder.judge.gradients.spoilt.known:  # a scaler let this step through: they were cleared by hand
                    guarded(recorder.judge.gradients.spoilt.forget_the_cleared)
                if not scaling and (not recorder.between_steps or recorder.schedule.comes_next(False)):
                    guarded(recorder.preprocessing.bookkeeping_done, False)

        def skipped(optimizer: Optimizer) -> None:
            if not recorder.active or (turns.are_several and turns.passes_over()) or scaling:
                return  # (a scaler's step tells what became of it)
            guarded(recorder.before_update, optimizer, True)
            if not recorder.counting:
                guarded(recorder.gradients.held_off_unscaled, optimizer)
            guarded(recorder.after_update, optimizer, True)
            guarded(recorder.preprocessing.bookkeeping_done, False)

        def watch_init(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
                original(self, *args, **kwargs)
                if recorder.active and not turns.is_anothers():  # else it is known when its thread is followed
                    guarded(recorder.preprocessing.optimizer_made, self, sys._getframe(1))

            return __init__

        add_before, add_after = compat.optimizer_step_hooks()
        self.handles += [add_before(before), add_after(after), compat.listen_to_skips(skipped)]
        self._patches.replace(Optimizer, "__init__", watch_init)
        bookkeeping = self._bookkeeping(is_last=True)
        self._patches.replace(Optimizer, "zero_grad", lambda original: self._then_forgotten(bookkeeping(original)))
        clearing = self._clearing()
        self._patches.replace(nn.Module, "zero_grad", lambda original: self._then_forgotten(clearing(original)))

    def _followed(self, closure: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
        """The closure, of which it is told when it returns."""
        recorder = self._recorder

        @functools.wraps(closure)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = closure(*args, **kwargs)
            if recorder.active:
                recorder.barrier.call(recorder.closure_ended, optimizer)
            return result

        return call

    def _then_forgotten(self, clear: Callable[..., Any]) -> Callable[..., Any]:
        """What was bad in the gradients is known until this call clears it."""
        recorder = self._recorder

        @functools.wraps(clear)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = clear(self, *args, **kwargs)
            if torch.compiler.is_compiling():
                return result
            if recorder.judge.gradients.spoilt.known and recorder.active and not recorder.paused:
                recorder.barrier.call(recorder.judge.gradients.spoilt.forget_the_cleared)
            return result

        return zero_grad

    def _bookkeeping(self, is_last: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Calls between two steps that are not worth taping; what follows them is preprocessing."""
        recorder = self._recorder
        guarded = recorder.barrier.call

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling():
                    return original(self, *args, **kwargs)
                if recorder.counting and not recorder.tape.is_on_stack:
                    return original(self, *args, **kwargs)  # nothing is taped any more
                if not recorder.between_steps or not recorder.active or recorder.paused:
                    if is_last and recorder.active and not recorder.paused:
                        guarded(recorder.gradients_cleared, id(self))
                    if recorder.tape.is_of_calls:
                        return recorder.tape.pass_over(original, self, *args, **kwargs)
                    return original(self, *args, **kwargs)
                if recorder.schedule.has_no_prefix and not recorder.tape.is_on_stack:
                    return original(self, *args, **kwargs)
                if recorder.tape.is_on_stack:
                    guarded(recorder.tape.leave)
                result = original(self, *args, **kwargs)
                if is_last or recorder.schedule.comes_next(False):
                    guarded(recorder.preprocessing.bookkeeping_done, is_last)
                return result

            return call

        return watch

    def _clearing(self) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        recorder = self._recorder

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling():
                    return original(self, *args, **kwargs)
                if recorder.active and not recorder.paused:
                    recorder.barrier.call(recorder.gradients_cleared, None)
                if recorder.tape.is_of_calls and not recorder.paused:
                    return recorder.tape.pass_over(original, self, *args, **kwargs)
                return original(self, *args, **kwargs)

            return zero_grad

        return watch


def _with_closure(args: Any, kwargs: Any, closure: Callable[..., Any]) -> tuple[Any, Any]:
    """The arguments of an optimizer's `step`, with this closure in place of the script's."""
    return (args, {**kwargs, "closure": closure}) if len(args) < 2 else ((args[0], closure, *args[2:]), kwargs)
