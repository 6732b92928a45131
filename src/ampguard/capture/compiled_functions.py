"""Compiled functions that are called outside every module: a loss, a whole forward pass.

What runs inside compiled code cannot be taped. Such a call is therefore recorded as a module's is, with its arguments
and random states, and replayed by calling the function again. A function that differentiates or updates is left alone:
what it calls is seen by itself.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ampguard import compat
from ampguard.capture.frames import is_user_code
from ampguard.capture.recorder import FlightRecorder

DRIVES = frozenset(["backward", "autograd", "grad", "step", "unscale_", "zero_grad"])
"""Names in a function that may differentiate or update: it is no forward pass."""

MAX_DEPTH = 3


class CompiledFunction(nn.Module):
    """A compiled function in the record. The modules that it can reach are its children."""

    def __init__(self, compiled: Callable[..., Any], reached: dict[str, nn.Module]) -> None:
        super().__init__()
        self._compiled = compiled
        compat.children_of(self).update(reached)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)


class FunctionOfOneModel(CompiledFunction):
    """Of a function that reaches one module: its parts are called what they are called in there."""

    hides = "model"


def recorded(recorder: FlightRecorder, function: Any, compiled: Callable[..., Any]) -> Callable[..., Any] | None:
    """The compiled function, whose calls outside every module are recorded; None where it is no forward pass."""
    if any(not DRIVES.isdisjoint(code.co_names) for code in codes_of(function)):
        return None
    known: dict[tuple[int, ...], CompiledFunction] = {}

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if recorder.paused or torch.compiler.is_compiling() or not recorder.active or not torch.is_grad_enabled():
            return compiled(*args, **kwargs)
        modules = modules_reached(function, args)
        key = tuple(map(id, modules.values()))
        if key not in known:
            known[key] = standing_for(compiled, modules)
        return known[key](*args, **kwargs)

    return call


def standing_for(compiled: Callable[..., Any], modules: dict[str, nn.Module]) -> CompiledFunction:
    """What stands for a compiled function in the record."""
    if len(modules) == 1:
        return FunctionOfOneModel(compiled, dict(zip([FunctionOfOneModel.hides], modules.values(), strict=True)))
    return CompiledFunction(compiled, modules)


def codes_of(function: Any, depth: int = 0) -> Iterator[types.CodeType]:
    """The code of a function and of the user's functions that it names."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None or depth > MAX_DEPTH or not is_user_code(code):
        return
    yield code
    yield from (inner for inner in code.co_consts if isinstance(inner, types.CodeType))
    for _, value in named_in(function):
        if isinstance(value, types.FunctionType):
            yield from codes_of(value, depth + 1)


def modules_reached(function: Any, args: tuple[Any, ...]) -> dict[str, nn.Module]:
    """The modules that a function can call, by the names that it knows them by."""
    found = {name: value for name, value in named_in(function) if isinstance(value, nn.Module)}
    found |= {f"argument{i}": value for i, value in enumerate(args) if isinstance(value, nn.Module)}
    if isinstance(getattr(function, "__self__", None), nn.Module):
        found["self"] = function.__self__
    seen: dict[int, str] = {}
    return {name: module for name, module in found.items() if seen.setdefault(id(module), name) == name}


def named_in(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function's closure holds and its code names among the globals."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
