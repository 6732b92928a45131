"""Which function of PyTorch's a function mode was really asked for.

PyTorch names the function that it hands to a function mode by looking it up: where a script has put a function of its
own in its place (`functional.cross_entropy = mine`, `Tensor.norm = mine`) that calls PyTorch's, the mode is handed the
script's, and to call it would apply it twice.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_MODES = frozenset({f"{__package__}.calltape", f"{__package__}.before_training"})
"""Whose frames lie between a call and the look for what it asked for."""
_PLACES: tuple[Any, ...] = (torch.nn.functional, torch.functional, Tensor)


def is_pytorchs(func: Any) -> bool:
    """Whether `func` was made by PyTorch: in C, or by code of its own files."""
    if isinstance(func, FunctionType):
        return func.__code__.co_filename.startswith(_TORCH)
    return not hasattr(func, "__code__") and type(func).__module__.partition(".")[0] in ("builtins", "torch")


class Replacements:
    """Asks again and again whether there are any such functions; little is done where all is as it was the last time."""

    def __init__(self) -> None:
        self._clear: list[list[Any]] = []
        """What stood in these places when nothing was found to be replaced."""

    def are_there(self) -> bool:
        found = [list(vars(place).values()) for place in _PLACES]
        if self._clear and all(map(_are_the_same, self._clear, found)):
            return False
        self._clear = [] if any(True for _ in replaced()) else found
        return not self._clear


def _are_the_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def replaced() -> Iterator[str]:
    """Names of functions that take tensors and that somebody has put others in the place of."""
    for place in _PLACES:
        for name, value in vars(place).items():
            if isinstance(value, FunctionType) and not is_pytorchs(value) and not is_ours(value):
                yield name


def original_of(func: Any, frame: FrameType | None) -> Any:
    """What is to be called for `func`, which is not PyTorch's; `frame` is that of our handler's caller."""
    is_asked_by_code = False
    while frame is not None and (frame.f_globals.get("__name__") in _MODES or _is_handler(frame)):
        is_asked_by_code = is_asked_by_code or _is_handler(frame)
        frame = frame.f_back
    if frame is None:
        return func
    code = frame.f_code
    if not is_asked_by_code:  # by PyTorch's C, which knows a method by its name
        name = next((name for name, value in vars(Tensor).items() if value is func), "")
        return getattr(Tensor.__base__, name, func)
    if code is getattr(func, "__code__", None) or not code.co_filename.startswith(_TORCH) or code.co_freevars:
        return func  # a library's own function asks for itself, as PyTorch's do
    return FunctionType(code, frame.f_globals)


class MetFunctions:
    """What to call for the functions that a function mode was handed."""

    def __init__(self) -> None:
        self.known: set[Any] = set()
        """Functions that are what PyTorch was asked for."""
        self._watched: dict[Any, Any] = {}
        """What stands behind the guard's own probes of methods."""
        self.is_misled = False
        """Whether PyTorch has handed us a function that the script had put in the place of its own."""

    def meet(self, func: Any, frame: FrameType | None) -> Any:
        """The function to call, where it is not known yet; `frame` is that of our handler's caller."""
        if func in self._watched:
            return self._watched[func]
        if not is_pytorchs(func):
            original = original_of(func, frame)
            if original is not func:
                if is_ours(func):  # a probe's, which has called PyTorch's
                    self._watched[func] = original
                else:
                    self.is_misled = True
                return original
        self.known.add(func)
        return func


def _is_handler(frame: FrameType) -> bool:
    return frame.f_code.co_name == "handle_torch_function"


def is_ours(func: Any) -> bool:
    """Whether `func` is a probe of the guard's."""
    return isinstance(func, FunctionType) and is_our_file(func.__code__.co_filename)


def is_our_file(path: str) -> bool:
    return path.startswith(_OURS)
