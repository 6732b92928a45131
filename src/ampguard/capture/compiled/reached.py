"""What a function of the user's can reach: by its closure, its globals, its arguments, the object that it belongs to."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.frames import is_user_code

UPDATES = frozenset(["step", "unscale_", "zero_grad", "grad"])
"""Names in a function that may update or clear gradients: it is no forward pass."""
DIFFERENTIATES = frozenset(["backward", "autograd"])

MAX_DEPTH = 3
MAX_PARTS = 256
"""Parts of an object or a container that are looked at; what holds more is data."""

NOT_USERS = ("torch", "builtins", "numpy")
"""Packages whose objects hold nothing that a step is made of."""

T = TypeVar("T")


def plain_function(function: Any) -> Any:
    """The function behind a bound method or a `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def is_users(function: Any) -> bool:
    """Whether this is a function of the user's: not a module, nor a method of PyTorch's own (`optimizer.step`)."""
    code = getattr(plain_function(function), "__code__", None)
    return code is not None and is_user_code(code)


def may_drive(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a function, or what it names of the user's, may differentiate or update: it is no forward pass."""
    called = (function, *methods_at_hand(function, args, kwargs))
    return any(not (UPDATES | DIFFERENTIATES).isdisjoint(code.co_names) for one in called for code in codes_of(one))


def may_differentiate(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a function, or what it names of the user's, may differentiate."""
    called = (function, *methods_at_hand(function, args, kwargs))
    if any(not DIFFERENTIATES.isdisjoint(code.co_names) for one in called for code in codes_of(one)):
        return True
    grad = inspect.unwrap(torch.autograd.grad)
    named = (dict(named_in(one)).get("grad") for one in (function, *functions_named_in(function)))
    return any(callable(value) and inspect.unwrap(value) is grad for value in named)


def only_updates(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a function that does not differentiate may use gradients: it is a part of the update."""
    if any("grad" in code.co_names for code in codes_of(function)):
        return True
    return any(isinstance(value, (Optimizer, GradScaler)) for _, value in near(function, args, kwargs))


def may_autocast(function: Any) -> bool:
    """Whether a function, or one of the user's that it names, may switch autocast on."""
    return any("autocast" in code.co_names for code in codes_of(function))


def codes_of(function: Any, depth: int = 0) -> Iterator[types.CodeType]:
    """The code of a function and of the user's functions that it names."""
    plain = plain_function(function)
    code = getattr(plain, "__code__", None)
    if code is None or depth > MAX_DEPTH or not is_user_code(code):
        return
    yield code
    yield from (inner for inner in code.co_consts if isinstance(inner, types.CodeType))
    for value in functions_named_in(function):
        yield from codes_of(value, depth + 1)


def functions_named_in(function: Any) -> list[Any]:
    """The functions that a function's code names, methods of its own object among them."""
    code = getattr(plain_function(function), "__code__", None)
    if code is None:
        return []
    found = [called for _, value in named_in(function) if (called := function_behind(value)) is not None]
    owner = getattr(function, "__self__", None)
    for name in code.co_names if owner is not None and not isinstance(owner, nn.Module) else ():
        method = getattr(type(owner), name, None)
        if isinstance(method, types.FunctionType):
            found.append(types.MethodType(method, owner))
    return found


def methods_at_hand(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Methods that a function's code names, of the user's objects that a call has at hand: `engine.run(x)`."""
    names = getattr(getattr(plain_function(function), "__code__", None), "co_names", ())
    found: list[Any] = []
    for _, value in near(function, args, kwargs) if names else ():
        if isinstance(value, (nn.Module, type)) or type(value).__module__.partition(".")[0] in NOT_USERS:
            continue
        methods = [getattr(type(value), name, None) for name in names]
        found += [types.MethodType(m, value) for m in methods if isinstance(m, types.FunctionType)]
    return found


def function_behind(value: Any) -> Any:
    """What runs when a value is called that is a function, or an object of a class of the user's with a `__call__`."""
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return value
    call = getattr(type(value), "__call__", None)  # noqa: B004
    if not isinstance(call, types.FunctionType) or isinstance(value, (type, nn.Module)):
        return None
    return types.MethodType(call, value) if is_user_code(call.__code__) else None


def named_in(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function's closure holds and its code names among the globals."""
    function = plain_function(function)
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


def near(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """What a call of a function has at hand, by the names that it knows it by; what plain objects hold too.

    `known` are the functions that lead to it.
    """
    if isinstance(function, functools.partial):
        yield from near(function.func, (*function.args, *args), {**function.keywords, **kwargs}, known)
        return
    known = (*known, plain_function(function))
    owner = getattr(function, "__self__", None)
    at_hand = [*named_in(function), *((f"argument{i}", value) for i, value in enumerate(args)), *kwargs.items()]
    for name, value in [*at_hand, ("self", owner)]:
        yield name, value
        for key, part in parts_of(value):
            yield f"{name}.{key}", part
    for helper in functions_named_in(function) if len(known) <= MAX_DEPTH else ():
        if is_users(helper) and plain_function(helper) not in known:
            yield from near(helper, (), {}, known)


def parts_of(value: Any) -> list[tuple[str, Any]]:
    """What a container or a plain object of the user's holds."""
    if isinstance(value, (list, tuple)):
        parts: dict[Any, Any] = dict(enumerate(value))
    elif isinstance(value, dict):
        parts = value
    elif isinstance(value, (nn.Module, type)) or type(value).__module__.partition(".")[0] in NOT_USERS:
        return []
    else:
        parts = getattr(value, "__dict__", {})
    return [(str(key), part) for key, part in list(parts.items())] if len(parts) <= MAX_PARTS else []


def of_kind(kind: type[T], function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, T]:
    """The objects of a class that a call can reach, each under its first name."""
    found: dict[str, T] = {}
    seen: set[int] = set()
    for name, value in near(function, args, kwargs):
        if isinstance(value, kind) and id(value) not in seen:
            seen.add(id(value))
            found.setdefault(name, value)
    return found


def modules_reached(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The modules that a call can reach; without those that are parts of others."""
    found = of_kind(nn.Module, function, args, kwargs)
    if len(found) < 2:
        return found
    inner = {id(part) for module in found.values() for part in compat.all_modules(module) if part is not module}
    return {name: module for name, module in found.items() if id(module) not in inner}
