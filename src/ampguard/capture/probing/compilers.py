"""The probes of compilers: `torch.compile` of functions, and `torch.jit.trace`."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ampguard import compat
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.compiled.reached import is_users
from ampguard.capture.compiled.steps import recorded_as_called
from ampguard.capture.glue.untaped import without_tape
from ampguard.capture.patches import Patches
from ampguard.capture.probing.aliases import names_of
from ampguard.capture.probing.probe import Probe
from ampguard.capture.recorder import FlightRecorder

PACKAGE = __name__.partition(".")[0]


class CompilerProbe(Probe):
    """Tells the recorder of compiled functions, and keeps us out of what is compiled or traced."""

    def __init__(self, recorder: FlightRecorder, patches: Patches) -> None:
        super().__init__(recorder, patches)
        self._hidden: set[str] = set()
        """Modules of ours whose code Dynamo leaves alone."""
        self._modules_hidden = 0
        """How many modules were imported when that was done last."""

    def install(self) -> None:
        for module, name in names_of(torch.compile):
            self._patches.replace(module, name, self._watch_compile)
        for name in ("trace", "trace_module"):
            self._patches.replace(torch.jit, name, self._off_tape)
        if compat.may_compile() or compat.has_compiled():
            self._recorder.barrier.call(self._hide)

    def _watch_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        @functools.wraps(original)
        def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            made = original(model, *args, **kwargs)
            if not recorder.active:
                return made
            recorder.barrier.call(recorder.before_training.end)
            recorder.barrier.call(self._hide)
            if isinstance(model, type) or not is_users(model):
                return made
            return recorded_as_called(recorder, model, made, self._hide)

        return compile

    def _hide(self) -> None:
        """Where compiled code stops at a call of ours (`backward`, a hook), Dynamo would compile our frames."""
        if len(sys.modules) != self._modules_hidden and compat.dynamo_is_loaded():
            self._modules_hidden = len(sys.modules)
            new = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == PACKAGE}
            compat.run_uncompiled([code for name in new.keys() - self._hidden for code in codes_of_module(new[name])])
            self._hidden |= new.keys()
            compat.run_uncompiled([FaultBarrier.call.__code__], with_calls=True)
            compat.stop_compiled_code_at(torch.autograd.grad)

    def _off_tape(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Tracing a module compares two graphs, and under a dispatch mode PyTorch cannot print one with a plain number."""
        recorder = self._recorder

        @functools.wraps(original)
        def trace(*args: Any, **kwargs: Any) -> Any:
            if not recorder.active or recorder.paused:
                return original(*args, **kwargs)
            with without_tape(recorder, is_silent=True):
                return original(*args, **kwargs)

        return trace


def codes_of_module(module: types.ModuleType) -> Iterator[types.CodeType]:
    """The code of every function of a module's own."""
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) == module.__name__:
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
