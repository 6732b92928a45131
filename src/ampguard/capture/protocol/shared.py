"""Parameters that belong to two optimizers: a scaler divides by optimizer, so it divides their gradients twice.

Asked of the gradient tensors themselves, by identity and version counter: one that was divided for the first optimizer
and that nobody has written to since must not be divided for the second. In iterations that are looked at closely.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.record import Line
from ampguard.compat import version_of


@dataclass(slots=True)
class _Divided:
    """A gradient as the scaler left it, for which optimizer, and at which line of the script."""

    parameter: Tensor
    watch: OptimizerWatch
    gradient: weakref.ref[Tensor]
    """By its identity a new one could be taken for it: memory is given out again."""
    version: int
    where: Line | None

    def is_as_left(self) -> bool:
        grad = self.parameter.grad
        return grad is not None and grad is self.gradient() and version_of(grad) == self.version

    def rest(self) -> None:
        """Who has written to it is known."""
        grad = self.parameter.grad
        if grad is not None:
            self.gradient, self.version = weakref.ref(grad), version_of(grad)


class SharedParameters:
    """Remembers what was divided for whom, as long as two optimizers hold the same parameters."""

    def __init__(self) -> None:
        self._divided: dict[int, _Divided] = {}

    def divided(self, watch: OptimizerWatch, others: Iterable[OptimizerWatch], where: Line | None) -> None:
        """The scaler has divided the gradients of `watch`."""
        shared = {id(p) for other in others if other is not watch for p in other.parameters()}
        for p in watch.parameters() if shared else ():
            grad = p.grad
            if grad is not None and id(p) in shared:
                self._divided[id(p)] = _Divided(p, watch, weakref.ref(grad), version_of(grad), where)

    def again(self, watch: OptimizerWatch) -> tuple[list[Tensor], OptimizerWatch, Line | None] | None:
        """Those of `watch` that were divided already for another optimizer: which, for whom, and where."""
        if not self._divided:
            return None
        known = [found for p in watch.parameters() if (found := self._divided.get(id(p))) is not None]
        twice = [found for found in known if found.watch is not watch and found.is_as_left()]
        return ([found.parameter for found in twice], twice[0].watch, twice[0].where) if twice else None

    def as_left(self) -> list[_Divided]:
        """Those that are as the scaler left them."""
        return [found for found in self._divided.values() if found.is_as_left()]

    def forget(self) -> None:
        """The scaler was updated: between two optimizers' steps perhaps (Accelerate, Lightning), and nothing else has come."""
        if self._divided:
            self._divided = {key: found for key, found in self._divided.items() if found.is_as_left()}
