"""Which of PyTorch's fused kernels there are, and which of them compute what they should."""

from __future__ import annotations

import weakref

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ampguard.compat import has_kernel, step_without_hooks, steps_as

_KERNELS = {AdamW: "_fused_adamw_", Adam: "_fused_adam_", SGD: "_fused_sgd_", Adagrad: "_fused_adagrad_"}
_DTYPES = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
_known: weakref.WeakKeyDictionary[type[Optimizer], type[Optimizer] | None] = weakref.WeakKeyDictionary()
_sound: dict[tuple[type[Optimizer], str, torch.dtype], bool] = {}


def family(optimizer_class: type[Optimizer]) -> type[Optimizer] | None:
    """PyTorch's class with a fused kernel by whose code this one steps: itself, or what a subclass leaves as it is."""
    if optimizer_class not in _known:
        found = (c for c in _KERNELS if issubclass(optimizer_class, c) and steps_as(optimizer_class, c))
        _known[optimizer_class] = next(found, None)
    return _known[optimizer_class]


def is_sound(known: type[Optimizer], device_type: str, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for these tensors, and on the CPU whether it passes a trial.

    The fused SGD of torch 2.13 leaves all but the last few elements of a bfloat16 or float16 parameter on the CPU as
    they were. Elsewhere a trial would wait for the device.
    """
    asked = (known, device_type, dtype)
    if asked not in _sound:
        exists = dtype in _DTYPES and has_kernel(_KERNELS[known], device_type)
        _sound[asked] = exists and (device_type != "cpu" or _passes_trial(known, dtype))
    return _sound[asked]


def _passes_trial(known: type[Optimizer], dtype: torch.dtype) -> bool:
    """One step of length 1 down a constant slope, over more elements than any vector register holds."""
    parameter = torch.zeros(259, dtype=dtype, device="cpu")
    parameter.grad = torch.ones_like(parameter)
    optimizer = known([parameter], lr=1.0, fused=True)  # type: ignore[call-arg]
    step_without_hooks(optimizer)(optimizer)
    return bool((parameter.double() + 1).abs().max() < 0.01)
