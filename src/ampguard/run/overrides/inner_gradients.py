"""Gradients inside the graph that a script looks at: those of activations, under a gained loss scale.

`h.retain_grad()`, `h.register_hook(...)` and a module's full backward hooks would else show 65536 times as much.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ampguard.capture.patches import Patches
from ampguard.engine.casting import map_tensors

Register = Callable[..., Any]
Noted = dict[int, weakref.ref[Tensor]]
"""Tensors by their identity."""


class InnerGradients:
    """Notes the activations that are asked for their gradients until they are differentiated."""

    def __init__(self, read_scale: Callable[[], float]) -> None:
        """`read_scale`: by what the gradients of the running backward pass are multiplied; 1 where none runs."""
        self._read_scale = read_scale
        self._hooked: Noted = {}
        self._retained: Noted = {}

    def install(self, patches: Patches) -> None:
        patches.replace(Tensor, "register_hook", functools.partial(_noting, self._hooked))
        patches.replace(Tensor, "retain_grad", functools.partial(_noting, self._retained))
        for name in ("register_full_backward_hook", "register_full_backward_pre_hook"):
            patches.replace(nn.Module, name, self._watch_module)

    def hooked(self) -> Iterator[Tensor]:
        """Those with hooks."""
        return _alive(self._hooked)

    def retained(self) -> Iterator[Tensor]:
        """Those that keep their gradient."""
        return _alive(self._retained)

    def differentiated(self) -> None:
        """A backward pass is over; the graphs of others (`retain_graph`) may still be there."""
        for noted in (self._hooked, self._retained):
            for key in [key for key, ref in noted.items() if ref() is None]:
                del noted[key]

    def _watch_module(self, original: Register) -> Register:
        @functools.wraps(original)
        def register(module: nn.Module, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return original(module, self._unscaled(hook), *args, **kwargs)

        return register

    def _unscaled(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def on_module(module: nn.Module, *gradients: Any) -> Any:
            scale = self._read_scale()
            if scale == 1.0:
                return hook(module, *gradients)
            given = hook(module, *_times(1.0 / scale, gradients))
            return None if given is None else _times(scale, given)

        return on_module


@torch.no_grad()
def _times(factor: float, gradients: Any) -> Any:
    return map_tensors(lambda t: t * factor, gradients)


def _noting(noted: Noted, original: Register) -> Register:
    @functools.wraps(original)
    def ask(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            noted[id(tensor)] = weakref.ref(tensor)
        return result

    return ask


def _alive(noted: Noted) -> Iterator[Tensor]:
    return (tensor for ref in noted.values() if (tensor := ref()) is not None)
