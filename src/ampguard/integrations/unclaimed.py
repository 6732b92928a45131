"""The first `step()` of an optimizer that nobody has named, on gradients that carry the loss scale.

Fabric tells its precision plugin of the modules that it sets up, and of an optimizer only when it steps by the wrapper that
`fabric.setup` has returned. One that the loop steps itself from the beginning is known by its parameters alone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine.setup import parameters_of
from ampguard.integrations.raw_backward import Mark


class UnclaimedGradients:
    """Gradients of scaled losses, of parameters that no optimizer known so far updates."""

    def __init__(self, on_step: Callable[[Optimizer], None]) -> None:
        """`on_step`: told of an optimizer that is about to step on some of them, all as the backward pass has left them."""
        self._on_step = on_step
        self._marks: dict[int, Mark] = {}
        self._handle: Any = None

    @contextlib.contextmanager
    def scaled(self, unclaimed: Sequence[Tensor]) -> Iterator[None]:
        """Around the backward pass of a scaled loss. Without such parameters all is known, and nothing is looked at."""
        if not unclaimed:
            self.leave()
            yield
            return
        before = [Mark(p) for p in unclaimed]
        yield
        self._marks |= {id(p): Mark(p) for p, mark in zip(unclaimed, before, strict=True) if not mark.holds()}
        if self._handle is None:
            register, _ = compat.optimizer_step_hooks()
            self._handle = register(compat.only_for_others(_before_step(weakref.ref(self))))
            weakref.finalize(self, self._handle.remove)

    def are_held(self, optimizer: Optimizer) -> bool:
        """Whether it would step on any of them."""
        marks = ((p, self._marks.get(id(p))) for p in parameters_of(optimizer))
        return any(mark is not None and mark.is_of(p) and mark.holds() for p, mark in marks)

    def leave(self) -> None:
        """Take the hook off again."""
        self._marks.clear()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _before_step(unclaimed: weakref.ref[UnclaimedGradients]) -> Callable[..., None]:
    def before_step(optimizer: Optimizer, *_: Any) -> None:
        its = unclaimed()
        if its is not None and not torch.compiler.is_compiling() and its.are_held(optimizer):
            its._on_step(optimizer)

    return before_step
