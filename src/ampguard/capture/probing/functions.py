"""The probes of functions: custom ones of autograd, and the way to a function mode."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from ampguard import compat
from ampguard.capture.frames import user_line
from ampguard.capture.glue.functions import checkpointed
from ampguard.capture.probing.aliases import names_of_apply
from ampguard.capture.probing.collectives import DIFFERENTIABLE
from ampguard.capture.probing.probe import Probe


class FunctionProbe(Probe):
    """Tells the recorder of custom functions outside modules."""

    def install(self) -> None:
        self._watch_dispatch()
        self._watch_custom_functions()
        self._watch_classes()
        self._watch_scripted()

    def _watch_dispatch(self) -> None:
        """PyTorch's way to a function mode takes three times as long as most functions that it is asked for."""
        calls = self._recorder.tape.calls
        for module in (torch.nn.functional, torch.functional):
            if hasattr(module, "handle_torch_function"):
                self._patches.replace(module, "handle_torch_function", calls.dispatcher)

    def _watch_custom_functions(self) -> None:
        recorder = self._recorder
        guarded, turns = recorder.barrier.call, recorder.turns

        def note_cut(args: tuple[Any, ...]) -> None:
            if not any(isinstance(given, Tensor) and given.requires_grad for given in args):
                recorder.cut_checkpoint = user_line(sys._getframe(3))

        def watch(original: Any) -> Any:
            inner = compat.apply_of(original)
            assert inner is not None

            def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
                is_ours = recorder.active and not recorder.paused and recorder.tape.is_taping
                if cls is CheckpointFunction and recorder.cut_checkpoint is None and torch.is_grad_enabled():
                    guarded(note_cut, args)
                if cls is CheckpointFunction and recorder.active and not recorder.paused:
                    return checkpointed(recorder.log, guarded, inner, cls, *args, **kwargs)
                if not is_ours or recorder.counting or is_pytorchs_own(cls) or compat.is_tracing():
                    return inner(cls, *args, **kwargs)
                if turns.take():
                    try:
                        return followed(cls, *args, **kwargs)
                    finally:
                        turns.lock.release()
                return inner(cls, *args, **kwargs)

            def followed(cls: type, *args: Any, **kwargs: Any) -> Any:
                call = guarded(recorder.functions.enter, cls, args, kwargs)
                if call is None:
                    return inner(cls, *args, **kwargs)
                recorder.paused = True
                try:
                    if recorder.live is not None:
                        guarded(recorder.tape.leave)
                        with recorder.live.watch(call):
                            output = inner(cls, *args, **kwargs)
                    else:
                        output = inner(cls, *args, **kwargs)
                finally:
                    recorder.paused = False
                guarded(recorder.functions.leave, call, output)
                guarded(recorder.resume_tape)
                return output

            return classmethod(functools.wraps(inner)(apply))

        if compat.apply_of(torch.autograd.Function.__dict__.get("apply")) is not None:
            known = names_of_apply()
            self._patches.replace(torch.autograd.Function, "apply", watch)
            for module, name in known:
                self._patches.replace(module, name, lambda bound: bound.__self__.apply)

    def _watch_classes(self) -> None:
        """`as_subclass` makes a new object of a result, behind the back of every mode.

        Tensors with a class of their own (fastai's images, MONAI's `MetaTensor`) pass it after each operator.
        """
        tape = self._recorder.tape
        guarded = self._recorder.barrier.call

        def watch(original: Any) -> Any:
            @functools.wraps(original)
            def as_subclass(tensor: Tensor, cls: Any) -> Any:
                renamed = original(tensor, cls)
                mode = compat.top_dispatch_mode()
                if mode is None and tape.is_of_calls and compat.function_modes_on():
                    mode = tape
                if isinstance(mode, compat.DispatchMode) and renamed is not tensor:
                    guarded(mode.renamed, tensor, renamed)
                return renamed

            return as_subclass

        self._patches.replace(torch.Tensor, "as_subclass", watch)

    def _watch_scripted(self) -> None:
        """What `torch.jit.script` and `trace` make of a function is called past every function mode."""
        recorder = self._recorder

        def watch(original: Any) -> Any:
            @functools.wraps(original)
            def call(function: Any, *args: Any, **kwargs: Any) -> Any:
                tape = recorder.tape
                if tape.is_of_calls and compat.function_modes_on():
                    return tape.calls.scripted(function, original, args, kwargs)
                return original(function, *args, **kwargs)

            return call

        if compat.SCRIPTED is not None:
            self._patches.replace(compat.SCRIPTED, "__call__", watch)


def is_pytorchs_own(function: type) -> bool:
    """Whether a custom function needs no record of its own: PyTorch's, but for those that wait for other ranks."""
    return function.__module__.startswith("torch.") and function.__module__ != DIFFERENTIABLE
