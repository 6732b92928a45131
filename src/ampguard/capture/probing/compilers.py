"""The probes of compilers: `torch.compile` of functions, and `torch.jit.trace`."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ampguard import compat
from ampguard.capture.compiled_functions import recorded
from ampguard.capture.patches import Patches
from ampguard.capture.recorder import FlightRecorder

PACKAGE = __name__.partition(".")[0]


class CompilerProbe:
    """Tells the recorder of compiled functions, and keeps us out of what is compiled or traced."""

    def __init__(self, recorder: FlightRecorder, patches: Patches) -> None:
        self._recorder = recorder
        self._patches = patches
        self._is_hidden = False

    def install(self) -> None:
        self._patches.replace(torch, "compile", self._watch_compile)
        for name in ("trace", "trace_module"):
            self._patches.replace(torch.jit, name, self._off_tape)
        if "torch._dynamo.eval_frame" in sys.modules:  # perhaps something is compiled already
            self._recorder.barrier.call(self._hide)

    def _watch_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        @functools.wraps(original)
        def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            made = original(model, *args, **kwargs)
            if not recorder.active:
                return made
            recorder.barrier.call(self._hide)
            if not isinstance(model, (types.FunctionType, types.MethodType)):
                return made
            called = recorder.barrier.call(recorded, recorder, model, made)
            return self._without_tape(made) if called is None else called

        return compile

    def _without_tape(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled function that differentiates: Dynamo puts back the dispatch state of its entry, the tape's with it."""
        recorder = self._recorder

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            tape = recorder.tape
            if not recorder.active or recorder.paused or torch.compiler.is_compiling() or tape.is_barred:
                return compiled(*args, **kwargs)
            recorder.barrier.call(tape.leave)
            tape.is_barred = True
            try:
                return compiled(*args, **kwargs)
            finally:
                tape.is_barred = False
                recorder.barrier.call(recorder.resume_tape)

        return call

    def _hide(self) -> None:
        """Where compiled code stops at a call of ours (`backward`, a hook), Dynamo would compile our frames."""
        if not self._is_hidden:
            self._is_hidden = True
            compat.run_uncompiled(list(our_codes()))

    def _off_tape(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Tracing a module compares two graphs, and under a dispatch mode PyTorch cannot print one with a plain number."""
        recorder = self._recorder

        @functools.wraps(original)
        def trace(*args: Any, **kwargs: Any) -> Any:
            if not recorder.active or recorder.paused:
                return original(*args, **kwargs)
            recorder.barrier.call(recorder.tape.leave)
            recorder.paused = True
            try:
                return original(*args, **kwargs)
            finally:
                recorder.paused = False
                recorder.barrier.call(recorder.resume_tape)

        return trace


def our_codes() -> Iterator[types.CodeType]:
    """The code of every function of ours that is imported."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != PACKAGE:
            continue
        for value in list(vars(module).values()):
            if getattr(value, "__module__", None) == name:
                yield from codes_in(value)


def codes_in(value: Any) -> Iterator[types.CodeType]:
    """The code of a function, of what is defined in it, or of a class's methods."""
    if isinstance(value, type):
        for inner in vars(value).values():
            yield from codes_in(inner)
        return
    for attribute in ("__func__", "fget", "func", "__wrapped__"):
        value = getattr(value, attribute, value)
    pending = [value.__code__] if isinstance(value, types.FunctionType) else []
    while pending:
        code = pending.pop()
        yield code
        pending += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
