"""What a float32 region does: cast the inputs, leave autocast, cast the results back."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from ampguard.engine.casting import cast_floats, lowest_dtype
from ampguard.engine.force_fp32.low_weights import low_weights_of, on_float32_casts
from ampguard.errors import SetupError

F = TypeVar("F", bound=Callable[..., Any])


def _device_types() -> tuple[str, str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu", "cpu" if accelerator is None else accelerator.type)


DEVICE_TYPES = _device_types()
"""Whose autocast may be on: the CPU's, and that of the accelerator of this machine. Asked once: a compiler traces this."""


@contextlib.contextmanager
def outside_autocast() -> Iterator[None]:
    """Autocast is off inside, whichever device's was on."""
    cpu, accelerator = DEVICE_TYPES
    with torch.autocast(cpu, enabled=False), torch.autocast(accelerator, enabled=False):
        yield


def call_in_fp32(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    cast_back: bool = True,
    without_floats: torch.dtype | None = None,
) -> Any:
    """`function` on float32 inputs, outside autocast.

    Its floating results get the narrowest type among the inputs, so that what follows sees what it saw before;
    `without_floats` is that type where no input is floating (an embedding's). Where all inputs were float32 (or with
    `cast_back=False`) the results stay float32.
    """
    back = (lowest_dtype((args, kwargs)) or without_floats) if cast_back else None
    with outside_autocast():
        args, kwargs = cast_floats((tuple(args), kwargs), torch.float32)
        result = function(*args, **kwargs)
    return result if back is None else cast_floats(result, back)


def in_fp32(function: F, cast_back: bool = True) -> F:
    """The function, made to run in float32: on float32 casts of low weights too, of the modules that it is given.

    Raises SetupError for a generator or a coroutine, whose lines run after the call has returned.
    """
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_kind(function) for is_kind in kinds):
        name = getattr(function, "__name__", type(function).__name__)
        raise SetupError(
            f"force_fp32 of `{name}`, a generator or coroutine: its lines run when the call has returned already, and would "
            "not be in float32\n"
            "  do    decorate the function that it calls, or write `with ampguard.force_fp32(...)` around lines without yield"
        )

    @functools.wraps(function)
    def forced(*args: Any, **kwargs: Any) -> Any:
        low = _low_among((*args, *kwargs.values()))  # the `self` of a method, too
        if not low:
            return call_in_fp32(function, args, kwargs, cast_back)
        with contextlib.ExitStack() as casts:
            for module, _ in low:
                casts.enter_context(on_float32_casts(module))
            return call_in_fp32(function, args, kwargs, cast_back, low[0][1])

    own: Any = forced
    own.__code__ = own.__code__.replace()  # a compiler counts its compilations by code: each function has its own
    return own  # type: ignore[no-any-return]


def _low_among(given: tuple[Any, ...]) -> list[tuple[nn.Module, torch.dtype]]:
    """The modules whose weights are low, each with their type."""
    low = []
    for value in given:  # a compiler traces this, and knows no assignment inside a comprehension
        dtype = low_weights_of(value) if isinstance(value, nn.Module) else None
        if dtype is not None:
            low.append((value, dtype))
    return low


def decorated(target: Any, cast_back: bool = True) -> Any:
    """What `@force_fp32` makes of a function, a method of any kind, a property or a module class."""
    if isinstance(target, type) and issubclass(target, nn.Module):
        target.forward = in_fp32(target.forward, cast_back)
        return target
    if isinstance(target, (classmethod, staticmethod)):
        return type(target)(in_fp32(target.__func__, cast_back))
    if isinstance(target, property) and target.fget is not None:
        return target.getter(in_fp32(target.fget, cast_back))
    if callable(target) and not isinstance(target, type):
        return in_fp32(target, cast_back)
    is_class = isinstance(target, type)
    what = f"`{target.__name__}`, a class that is no module" if is_class else f"a {type(target).__name__}"
    do = "decorate the function that calls it" if is_class else "put @ampguard.force_fp32 nearest to the function"
    raise SetupError(
        f"force_fp32 of {what}: it decorates functions, methods, properties and module classes\n"
        f"  do    {do}{'' if is_class else ', below other decorators'}"
    )


def is_descriptor(value: Any) -> bool:
    """Whether it stands for a function in a class: a property, a class method, a `functools.cached_property`."""
    return hasattr(type(value), "__get__")


class Region:
    """`with force_fp32(q, k) as (q, k):` or `@force_fp32(cast_back=False)`."""

    def __init__(self, values: tuple[Any, ...], cast_back: bool) -> None:
        if values and all(isinstance(value, (bool, int, float, complex)) for value in values):
            raise SetupError(
                f"force_fp32({', '.join(map(repr, values))}): there is no tensor to cast\n"
                "  do    pass the tensors that are computed with: with ampguard.force_fp32(q, k) as (q, k)"
            )
        self._values = values
        self._cast_back = cast_back
        self._left: list[Any] = []

    def __enter__(self) -> Any:
        """The values in float32: as one where there is one, else as a tuple."""
        left = outside_autocast()
        left.__enter__()
        self._left.append(left)
        cast = cast_floats(self._values, torch.float32)
        return cast[0] if len(cast) == 1 else cast

    def __exit__(self, *exception: Any) -> None:
        self._left.pop().__exit__(*exception)

    def __call__(self, function: F) -> F:
        return decorated(function, self._cast_back)  # type: ignore[no-any-return]
