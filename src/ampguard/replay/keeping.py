"""Keeping what a second run of a forward pass could change, and putting it back.

A forward pass may write anywhere: into a queue in a list, a counter of a plain object, a parameter's `.data`, a random
generator of its own, a global. All that can be reached from a module (its attributes, what its methods' globals name,
what its hooks hold) is kept before a replay and put back after it. Memory of the script is written to only where the
replay has changed it, and past the version counters, so that the script's own backward pass still finds what it saved.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.frames import is_user_code
from ampguard.replay.trace import identical

MAX_ITEMS = 10_000
MAX_DEPTH = 5
MAX_ELEMENTS = 1 << 28
"""Elements that are copied in all; what lies beyond is taken to be left alone."""

CONTAINERS = (list, dict, set, deque)
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, range, type)
OPAQUE = (types.ModuleType, types.BuiltinFunctionType, property, staticmethod, classmethod)


class StateKeeper:
    """Notes state that can be reached, and restores it."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self._kept: list[Any] = []
        self._elements = 0
        self._copies: dict[int, Any] = {}
        """What stands in the place of an iterator: a second run uses up the copy, and the script keeps its own."""

    def restore(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._seen.clear()
        self._kept.clear()
        self._copies.clear()

    def keep(self, value: Any, depth: int = 0) -> None:
        """Keep whatever state `value` is or holds."""
        if isinstance(value, (*PLAIN, *OPAQUE)) or id(value) in self._seen or depth > MAX_DEPTH:
            return
        self._seen.add(id(value))
        self._kept.append(value)  # so that its identity stays its own
        if isinstance(value, Tensor):
            self.keep_tensor(value)
        elif isinstance(value, CONTAINERS):
            self._keep_container(value, depth)
        elif isinstance(value, tuple):
            for item in value[:MAX_ITEMS]:
                self.keep(item, depth + 1)
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._undo.append(lambda: _call(value.set_state, state))
        elif isinstance(value, random.Random):
            inner = value.getstate()
            self._undo.append(lambda: value.setstate(inner))
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.keep(part, depth + 1)
        elif isinstance(value, types.MethodType):
            self.keep(value.__self__, depth + 1)
            self.keep_function(value.__func__, depth + 1)
        elif isinstance(value, types.FunctionType):
            self.keep_function(value, depth + 1)
        elif not self._keep_array(value) and not isinstance(value, nn.Module):
            self._keep_object(value, depth)

    def keep_tensor(self, tensor: Tensor) -> None:
        """A tensor's memory and contents; past its version counter, which a write by `.data` does not move either."""
        if not compat.is_dense(tensor) or tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            return
        if self._elements + tensor.numel() > MAX_ELEMENTS:
            return
        self._elements += tensor.numel()
        with torch.no_grad():
            memory = tensor.data
            contents = memory.clone()

        def restore() -> None:
            with torch.no_grad():
                if tensor.data_ptr() != memory.data_ptr() or tensor.shape != memory.shape:
                    tensor.data = memory
                if not identical(memory, contents):
                    memory.copy_(contents)

        self._undo.append(restore)

    def keep_attributes(self, attributes: dict[str, Any], depth: int = 0) -> None:
        """What an object's or a class's names stand for, and what that holds."""
        before = dict(attributes)

        def restore() -> None:
            for name in [n for n in attributes if n not in before]:
                del attributes[name]
            for name, value in before.items():
                if attributes.get(name) is not value or name not in attributes:
                    attributes[name] = value

        self._undo.append(restore)
        for name, value in before.items():
            if self._is_iterator(value):
                attributes[name] = self._copy_of(value)
            else:
                self.keep(value, depth + 1)

    def keep_class(self, kind: type) -> None:
        """The attributes of the user's classes, and what their methods can reach."""
        for base in kind.__mro__:
            if base is object or base.__module__.startswith("torch.") or id(base) in self._seen:
                continue
            self._seen.add(id(base))
            for name, value in list(vars(base).items()):
                if isinstance(value, (types.FunctionType, staticmethod, classmethod)):
                    self.keep_function(getattr(value, "__func__", value))
                elif not name.startswith("__") and not callable(value) and not isinstance(value, OPAQUE):
                    self.keep(value, 1)
                    self._undo.append(_binding(base, name, value))
                    if self._is_iterator(value):
                        setattr(base, name, self._copy_of(value))

    def keep_function(self, function: Any, depth: int = 0) -> None:
        """What a function of the user's can reach: its closure, its defaults, the globals that it names."""
        code = getattr(function, "__code__", None)
        if code is None or id(code) in self._seen or not is_user_code(code) or depth > MAX_DEPTH:
            return
        self._seen.add(id(code))
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):
                if not isinstance(cell.cell_contents, nn.Module):
                    value = cell.cell_contents
                    self.keep(value, depth + 1)
                    self._undo.append(_filled(cell, value))
                    if self._is_iterator(value):
                        cell.cell_contents = self._copy_of(value)
        for value in function.__defaults__ or ():
            self.keep(value, depth + 1)
        scope = function.__globals__
        for name in code.co_names:
            if name not in scope:
                continue
            value = scope[name]
            if isinstance(value, types.FunctionType):
                self.keep_function(value, depth + 1)
            elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
                self.keep_class(value)  # what its forward and backward write to
            elif not isinstance(value, (*OPAQUE, type, nn.Module)):
                self.keep(value, depth + 1)
                self._undo.append(_entry(scope, name, value))
                if self._is_iterator(value):
                    scope[name] = self._copy_of(value)

    def _keep_container(self, container: Any, depth: int) -> None:
        if len(container) > MAX_ITEMS:
            return
        if isinstance(container, dict):
            before = dict(dict.items(container))  # past a `__getitem__` of its own, which may make what it returns
            self._undo.append(lambda: _refill_dict(container, before))
            values = list(before.values())
        else:
            values = items = list(container)
            if isinstance(container, list):
                self._undo.append(lambda: _refill_list(container, items))
            else:
                self._undo.append(lambda: _refill(container, items))
        for value in values:
            self.keep(value, depth + 1)

    def _keep_array(self, value: Any) -> bool:
        """numpy's arrays and generators."""
        numpy = sys.modules.get("numpy")
        if numpy is None or not hasattr(numpy, "ndarray"):
            return False
        if isinstance(value, numpy.ndarray):
            if value.size <= MAX_ELEMENTS and value.flags.writeable and value.dtype != object:
                contents = value.copy()
                self._undo.append(lambda: numpy.copyto(value, contents))
            return True
        if isinstance(value, numpy.random.Generator):
            state = value.bit_generator.state
            self._undo.append(lambda: setattr(value.bit_generator, "state", state))
            return True
        if isinstance(value, numpy.random.RandomState):
            legacy = value.get_state()
            self._undo.append(lambda: value.set_state(legacy))
            return True
        return False

    def _keep_object(self, value: Any, depth: int) -> None:
        """An object of a class of the user's."""
        where = type(value).__module__ or ""
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and not where.startswith(("torch.", "builtins", "logging", "threading")):
            self.keep_attributes(attributes, depth)

    def _copy_of(self, iterator: Any) -> Any:
        """One copy for an iterator that is reached on several ways."""
        if id(iterator) not in self._copies:
            self._kept.append(iterator)  # so that its identity stays its own
            self._copies[id(iterator)] = _copied(iterator)
        return self._copies[id(iterator)]

    @staticmethod
    def _is_iterator(value: Any) -> bool:
        return hasattr(value, "__next__") and not isinstance(value, (types.GeneratorType, Tensor, nn.Module))


def _call(function: Callable[..., Any], *args: Any) -> None:
    function(*args)


def _copied(value: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 says so of each copy of `itertools.count`
            return copy.copy(value)
    except Exception:
        return value


def _binding(owner: type, name: str, value: Any) -> Callable[[], None]:
    def restore() -> None:
        if vars(owner).get(name) is not value:
            setattr(owner, name, value)

    return restore


def _filled(cell: types.CellType, value: Any) -> Callable[[], None]:
    def restore() -> None:
        if cell.cell_contents is not value:
            cell.cell_contents = value

    return restore


def _entry(scope: dict[str, Any], name: str, value: Any) -> Callable[[], None]:
    def restore() -> None:
        if scope.get(name) is not value:
            scope[name] = value

    return restore


def _refill_dict(container: dict[Any, Any], items: dict[Any, Any]) -> None:
    now = dict(dict.items(container))
    if len(now) != len(items) or any(k not in now or now[k] is not v for k, v in items.items()):
        kind: type[dict[Any, Any]] = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)
        for key, value in items.items():
            kind.__setitem__(container, key, value)


def _refill_list(container: list[Any], items: list[Any]) -> None:
    if len(container) != len(items) or any(a is not b for a, b in zip(container, items, strict=True)):
        container[:] = items


def _refill(container: Any, items: list[Any]) -> None:
    container.clear()
    container.update(items) if isinstance(container, set) else container.extend(items)
