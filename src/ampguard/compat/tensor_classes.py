"""Tensor classes that are asked about every call on their tensors (`__torch_function__`), and how to go past them.

Such a class of the script's own is told of a read of `dtype`, too. It may count or print what it is told, or refuse what
it does not know: what the guard reads is none of its business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_enable: Callable[[], Any] | None = getattr(torch._C, "_EnableTorchFunction", None)

_is_all_off: Callable[[], bool] | None = getattr(torch._C, "_is_torch_function_all_disabled", None)

_OF_PYTORCH = (
    getattr(Tensor.__torch_function__, "__func__", None),
    getattr(torch._C, "_disabled_torch_function_impl", None),
)

asked_classes: set[str] = set()
"""Names of the classes that were found so far, of the whole process. While it is empty nothing has to be gone past."""


def is_asked(kind: type) -> bool:
    """Whether a class of tensors, not one of PyTorch's own, answers to calls on its tensors itself."""
    handler: Any = getattr(kind, "__torch_function__", None)
    own = getattr(handler, "__func__", handler)
    return own is not None and own not in _OF_PYTORCH and not kind.__module__.startswith("torch.")


def note_class(kind: type) -> None:
    """A class of tensors was defined."""
    if is_asked(kind):
        asked_classes.add(f"{kind.__module__}.{kind.__qualname__}")


def note_known_classes() -> None:
    """All classes of tensors that there are."""
    seen: set[type] = set()
    waiting: list[type] = [Tensor]
    while waiting:
        kinds: list[type] = type.__subclasses__(waiting.pop())
        for kind in kinds:
            if kind not in seen:
                seen.add(kind)
                waiting.append(kind)
                note_class(kind)


classes_are_asked: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Whether a call on this thread reaches the class of its tensors; PyTorch's own function."""


def past_classes() -> Any:
    """A context in which no class of tensors is asked about a call."""
    return torch._C.DisableTorchFunctionSubclass()


def asking_classes() -> Any:
    """Within `past_classes`, a context in which they are asked again: what the script computes is computed as it means it."""
    if not asked_classes or _enable is None or classes_are_asked() or (_is_all_off is not None and _is_all_off()):
        return contextlib.nullcontext()
    return _enable()


def in_class_of(copy: Tensor, tensor: Tensor) -> Tensor:
    """A copy that was made past the class of `tensor`, as one of that class, with the attributes that were set on it."""
    kind = type(tensor)
    if not asked_classes or type(copy) is kind or not is_asked(kind):
        return copy
    with past_classes():
        alike: Tensor = copy.as_subclass(kind)
    alike.__dict__.update(tensor.__dict__)
    return alike
