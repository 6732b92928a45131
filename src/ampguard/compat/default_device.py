"""`torch.set_default_device`: a function mode of PyTorch's own at the bottom of the stack, which only adds a device.

It is no mode of the script's that our operators would have to be hidden from; but tensors that we make are not to lie where
the script's would, and what is run again of the script's is to have it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch.utils._device

from ampguard.compat.modes import function_mode_at, function_modes_on, pop_function_mode, push_function_mode

_KIND: type | None = getattr(torch.utils._device, "DeviceContext", None)


class _PutAside(threading.local):
    modes: tuple[Any, ...] = ()


_put_aside = _PutAside()


def is_default_device(depth: int) -> bool:
    """Whether the function modes of the thread, which are `depth`, are nothing but a default device."""
    return depth == 1 and _KIND is not None and type(function_mode_at(0)) is _KIND


def may_lie_below(depth: int) -> bool:
    """Whether a function mode of ours may be put above those of the thread: a default device that `set_default_device` has
    set, which looks for itself when it goes. The end of `with torch.device(...)` takes off whatever is on top.
    """
    stays = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return is_default_device(depth) and function_mode_at(0) is stays


@contextlib.contextmanager
def without_default_device() -> Iterator[None]:
    """Tensors are made on the CPU, as without it."""
    if not is_default_device(function_modes_on()):
        yield
        return
    before = _put_aside.modes
    _put_aside.modes = (pop_function_mode(),)
    try:
        yield
    finally:
        for mode in _put_aside.modes:
            push_function_mode(mode)
        _put_aside.modes = before


@contextlib.contextmanager
def scripts_default_device() -> Iterator[None]:
    """Tensors are made where the script's are, within `without_default_device`."""
    modes = _put_aside.modes or _in_a_call()
    if not modes or function_modes_on():
        yield
        return
    before = _put_aside.modes
    _put_aside.modes = ()
    for mode in modes:
        push_function_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            pop_function_mode()
        _put_aside.modes = before


def _in_a_call() -> tuple[Any, ...]:
    """The mode while it is being asked about a call (`loss.backward()`): PyTorch has taken it off the stack until it returns."""
    handler = getattr(getattr(_KIND, "__torch_function__", None), "__code__", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not handler:
        frame = frame.f_back
    return (frame.f_locals["self"],) if frame is not None else ()
