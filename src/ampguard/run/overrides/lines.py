"""Lines made to run in float32, most of them outside modules: their operators leave autocast and get float32 operands.

What a line itself casts to low precision stays float32.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ampguard import numerics
from ampguard.capture.frames import user_line
from ampguard.engine.force_fp32 import call_in_fp32


class LinesInFloat32:
    """Off, and free of cost, until a line is added; from then on every call into PyTorch is asked for its line."""

    def __init__(self) -> None:
        self._lines: set[tuple[str, int]] = set()
        self._mode: _Mode | None = None

    def add(self, lines: Iterable[tuple[str, int]]) -> None:
        """(name of the file, number): as fixes name them."""
        self._lines |= set(lines)
        if self._mode is None:
            self._mode = _Mode(self._lines)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    @property
    def are_forced(self) -> bool:
        """Whether there are any."""
        return self._mode is not None

    def holds(self, file: str, number: int) -> bool:
        """Whether a line runs in float32."""
        return (file, number) in self._lines

    def within_modules(self) -> contextlib.AbstractContextManager[object]:
        """The same inside, where the modes of the script's thread are off: lines of modules, in a step made again."""
        return _Mode(self._lines) if self._lines else contextlib.nullcontext()

    def undo(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None


class _Mode(TorchFunctionMode):
    def __init__(self, lines: set[tuple[str, int]]) -> None:
        super().__init__()
        self._lines = lines
        self._files: dict[CodeType, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        line = user_line(sys._getframe(1))
        if line is None or (self._file(line.code), line.number) not in self._lines or _is_no_operator(func):
            return func(*args, **kwargs)
        func, args, kwargs = _without_casts(func, args, kwargs)
        return call_in_fp32(func, args, kwargs, cast_back=False)

    def _file(self, code: CodeType) -> str:
        known = self._files.get(code)
        if known is None:
            known = self._files[code] = os.path.basename(code.co_filename)
        return known


def _without_casts(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The same call where it casts to low precision (`x.half()`, `x.to(torch.float16)`), with float32 in the place of that."""
    if func in (torch.Tensor.half, torch.Tensor.bfloat16):
        return torch.Tensor.float, args[:1], {}
    widened = {name: _widened(value) for name, value in kwargs.items()}
    return func, tuple(map(_widened, args)), widened


def _widened(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and numerics.is_low_precision(value) else value


def _is_no_operator(func: Any) -> bool:
    """Looking at an attribute, and what changes its own operand or the graph."""
    name = getattr(func, "__name__", "")
    return name in ("__get__", "__set__", "backward", "requires_grad_", "register_hook") or name.endswith("_")
