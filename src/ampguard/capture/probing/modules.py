"""The probe of module calls: the outermost ones are recorded, those inside them are nobody's business."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import nn

from ampguard import compat
from ampguard.capture.probing.probe import Probe
from ampguard.capture.root_calls.resting import RestingCalls
from ampguard.compat import in_functorch, tracing_state


class ModuleProbe(Probe):
    """Tells the recorder of every root call."""

    def install(self) -> None:
        self._watch_modules()
        self._watch_functional_calls()
        self._watch_training()

    def _watch_modules(self) -> None:
        recorder = self._recorder
        guarded, pace, drivers, turns = recorder.barrier.call, recorder.pace, recorder.drivers, recorder.turns
        lock = turns.lock
        resting = RestingCalls(recorder)

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            def root_call(module: nn.Module, args: Any, kwargs: Any) -> Any:
                if tracing_state() is not None:
                    guarded(recorder.tape.leave)
                    return original(module, *args, **kwargs)
                if drivers.has_any and module in drivers.known:
                    return original(module, *args, **kwargs)
                me = get_ident()
                if (me == turns.thread or guarded(turns.takes_over)) and lock.acquire(False):
                    try:
                        if me == turns.thread:
                            is_looked_at = pace.is_resting and not torch.is_grad_enabled() and not recorder.counting
                            if is_looked_at and pace.rests():
                                return resting_call(module, args, kwargs)
                            return followed_call(module, args, kwargs)
                    finally:
                        lock.release()
                return original(module, *args, **kwargs)

            def followed_call(module: nn.Module, args: Any, kwargs: Any) -> Any:
                root = guarded(recorder.enter_root, module, args, kwargs)
                if root is None and in_functorch():  # what a transform of torch.func runs is taped as it comes
                    log = recorder.log
                    is_inner, log.runs_modules = log.runs_modules, True
                    try:
                        return original(module, *args, **kwargs)
                    finally:
                        log.runs_modules = is_inner
                recorder.paused = True
                try:
                    live = recorder.live if root is not None else None
                    if live is not None and root is not None:
                        with live.watch(root):
                            output = original(module, *args, **kwargs)
                    else:
                        output = original(module, *args, **kwargs)
                except BaseException as error:
                    recorder.paused = False
                    if root is not None:
                        guarded(recorder.root_raised, root, error)
                    raise
                finally:
                    recorder.paused = False
                if root is not None:
                    guarded(recorder.leave_root, root, output)
                elif recorder.counting and not torch.is_grad_enabled():
                    guarded(recorder.judge.outputs.count, output)
                return output

            def resting_call(module: nn.Module, args: Any, kwargs: Any) -> Any:
                args_before, kwargs_before = guarded(resting.enter, module, args, kwargs) or (args, kwargs)
                recorder.paused = True
                try:
                    output = original(module, *args, **kwargs)
                except Exception as error:
                    recorder.paused = False
                    guarded(resting.look_at_error, module, args_before, kwargs_before, error)
                    raise
                finally:
                    recorder.paused = False
                guarded(resting.look_at, module, args_before, kwargs_before, output)
                return output

            def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
                if recorder.paused or torch.compiler.is_compiling() or not recorder.active:
                    return original(self, *args, **kwargs)
                return root_call(self, args, kwargs)

            return (
                compat.call_while_paused(recorder, original, __call__)
                if compat.only_forwards_to_call_impl(original)
                else __call__
            )

        self._patches.replace(nn.Module, "__call__", watch)

    def _watch_functional_calls(self) -> None:
        """`torch.func.functional_call` runs a module on other parameters than its own."""
        recorder = self._recorder

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def functional_call(module: nn.Module, parameters_and_buffers: Any, *args: Any, **kwargs: Any) -> Any:
                before, recorder.swapped_state = recorder.swapped_state, (module, parameters_and_buffers)
                try:
                    return original(module, parameters_and_buffers, *args, **kwargs)
                finally:
                    recorder.swapped_state = before

            return functional_call

        place = compat.functional_call()
        if place is not None:
            self._patches.replace(*place, watch)

    def _watch_training(self) -> None:
        recorder = self._recorder
        guarded = recorder.barrier.call

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def train(self: nn.Module, mode: bool = True) -> Any:
                if self.training != mode and recorder.active and not recorder.paused:
                    if recorder.judge.suspects:
                        guarded(recorder.judge.settle_all)
                    if not mode and recorder.between_steps and not recorder.counting:
                        result = original(self, mode)
                        guarded(recorder.preprocessing.evaluation_begins)
                        return result
                return original(self, mode)

            return train

        self._patches.replace(nn.Module, "train", watch)
