"""What a function of the user's can reach: by its closure, its globals, its arguments, the object that it belongs to."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from ampguard.capture.frames import is_user_code

DRIVES = frozenset(["backward", "autograd", "grad", "step", "unscale_", "zero_grad"])
"""Names in a function that may differentiate or update: it is no forward pass."""

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


def may_drive(function: Any) -> bool:
    """Whether a function, or one of the user's that it names, may differentiate or update."""
    return any(not DRIVES.isdisjoint(code.co_names) for code in codes_of(function))


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
    found = [value for _, value in named_in(function) if isinstance(value, (types.FunctionType, types.MethodType))]
    owner = getattr(function, "__self__", None)
    for name in code.co_names if owner is not None and not isinstance(owner, nn.Module) else ():
        method = getattr(type(owner), name, None)
        if isinstance(method, types.FunctionType):
            found.append(types.MethodType(method, owner))
    return found


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


def near(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """What a call of a function has at hand, by the names that it knows it by; what plain objects hold too."""
    if isinstance(function, functools.partial):
        yield from near(function.func, (*function.args, *args), {**function.keywords, **kwargs}, depth)
        return
    owner = getattr(function, "__self__", None)
    at_hand = [*named_in(function), *((f"argument{i}", value) for i, value in enumerate(args)), *kwargs.items()]
    for name, value in [*at_hand, ("self", owner)]:
        yield name, value
        for key, part in parts_of(value):
            yield f"{name}.{key}", part
    for helper in functions_named_in(function) if depth < MAX_DEPTH else ():
        code = plain_function(helper).__code__
        if is_user_code(code) and helper is not function:
            yield from near(helper, (), {}, depth + 1)


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
    inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
    return {name: module for name, module in found.items() if id(module) not in inner}
