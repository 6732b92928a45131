"""Hooks of parameters under a gained loss scale: they see gradients as they would be without it.

A hook that clamps a gradient, or an optimizer that steps while backward runs, would else act on 65536 times as much.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ampguard import compat

Multiply = Callable[[Iterable[Tensor], float], None]
Hook = Callable[[Tensor], Any]


@contextlib.contextmanager
def unscaled_hooks(leaves: Iterable[Tensor], scale: float, multiply: Multiply) -> Iterator[None]:
    """For one backward pass of losses that were multiplied by `scale`. `multiply` multiplies leaves' gradients."""
    replaced: list[tuple[Any, Any, Hook]] = []
    for leaf in leaves:
        for hooks, wrapped in (
            (compat.hooks_of_leaf(leaf), _on_gradient),
            (compat.hooks_behind_leaf(leaf), _on_complete_gradient),
        ):
            for key, hook in list(hooks.items()) if hooks else ():
                replaced.append((hooks, key, hook))
                hooks[key] = wrapped(hook, scale, multiply)
    try:
        yield
    finally:
        for hooks, key, hook in replaced:
            if key in hooks:
                hooks[key] = hook


def _on_gradient(hook: Hook, scale: float, multiply: Multiply) -> Hook:
    """A hook that is given what is to be added to `.grad`, and may return another one, or write to it."""

    @functools.wraps(hook)
    def on_gradient(gradient: Tensor) -> Any:
        with torch.no_grad(), compat.unseen():
            unscaled = gradient / scale
            version = compat.version_of(unscaled)
        given = hook(unscaled)
        if given is None and compat.version_of(unscaled) == version:
            return None
        with torch.no_grad(), compat.unseen():
            return (unscaled if given is None else given) * scale

    return on_gradient


def _on_complete_gradient(hook: Hook, scale: float, multiply: Multiply) -> Hook:
    """A hook that is given the parameter, whose `.grad` is complete."""

    @functools.wraps(hook)
    def on_complete_gradient(leaf: Tensor) -> None:
        multiply([leaf], 1.0 / scale)
        try:
            hook(leaf)
        finally:
            multiply([leaf], scale)

    return on_complete_gradient
