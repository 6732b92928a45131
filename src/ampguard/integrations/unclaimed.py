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

    @contextlib.contextmanager
    def scaled(self, unclaimed: Sequence[Tensor]) -> Iterator[None]:
        """Around the backward pass of a scaled loss. Without such parameters all is known, and nothing is looked at."""
        if not unclaimed:
            self._marks.clear()
            yield
            return
        before = [Mark(p) for p in unclaimed]
        yield
        self._marks |= {id(p): Mark(p) for p, mark in zip(unclaimed, before, strict=True) if not mark.holds()}
        _listen(self)

    def are_held(self, optimizer: Optimizer) -> bool:
        """Whether it would step on any of them."""
        marks = ((p, self._marks.get(id(p))) for p in parameters_of(optimizer))
        return any(mark is not None and mark.is_of(p) and mark.holds() for p, mark in marks)

    def before_step(self, optimizer: Optimizer) -> None:
        if self._marks and self.are_held(optimizer):
            self._on_step(optimizer)


_listening: weakref.WeakSet[UnclaimedGradients] = weakref.WeakSet()
_hooks: list[Any] = []
"""One for all. It stays: taken off while PyTorch goes through such hooks (by the garbage collector, say), it would end a step."""


def _listen(unclaimed: UnclaimedGradients) -> None:
    _listening.add(unclaimed)
    if not _hooks:
        register, _ = compat.optimizer_step_hooks()
        _hooks.append(register(compat.only_for_others(_before_step)))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if _listening and not torch.compiler.is_compiling():
        for each in list(_listening):
            each.before_step(optimizer)
