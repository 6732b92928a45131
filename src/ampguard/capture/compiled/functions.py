"""Compiled functions that are called outside every module: a loss, a whole forward pass, a whole training step.

What runs inside compiled code cannot be taped. Such a call is therefore recorded as a module's is, with its arguments
and random states, and replayed by calling the function again (see `compiled_steps` for one that differentiates).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ampguard import compat
from ampguard.capture.compiled.reached import may_autocast, modules_reached
from ampguard.capture.recorder import FlightRecorder


class CompiledFunction(nn.Module):
    """A compiled function in the record. The modules that it can reach are its children, and it is none itself.

    `function` is what was compiled: a replay puts back what that can change.
    """

    def __init__(self, compiled: Callable[..., Any], function: Any, reached: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._compiled = compiled
        self._function = function
        compat.children_of(self).update(reached)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)


def hides_autocast(root: nn.Module) -> bool:
    """Whether compiled code may switch autocast on, which nobody sees then."""
    if isinstance(root, CompiledFunction):
        return may_autocast(root._function) or any(
            may_autocast(type(part).forward) for part in compat.all_modules(root)
        )
    compiled = [part for part in compat.all_modules(root) if compat.is_compiled(part)]
    return any(may_autocast(type(part).forward) for outer in compiled for part in compat.all_modules(outer))


def recorded(recorder: FlightRecorder, function: Any, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function, whose calls outside every module are recorded."""
    known: dict[tuple[int, ...], CompiledFunction] = {}

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if recorder.paused or torch.compiler.is_compiling() or not recorder.active:
            return compiled(*args, **kwargs)
        modules = recorder.barrier.call(modules_reached, function, args, kwargs)
        if modules is None or not (modules or torch.is_grad_enabled()):
            return compiled(*args, **kwargs)
        key = tuple(map(id, modules.values()))
        if key not in known:
            known[key] = CompiledFunction(compiled, function, modules)
        return known[key](*args, **kwargs)

    return call
