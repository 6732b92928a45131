"""Gradients that an earlier backward pass left non-finite: until they are cleared, they are no news."""

from __future__ import annotations

import weakref

from torch import Tensor

from ampguard.numerics import is_finite


class SpoiltGradients:
    """Remembers which they are."""

    def __init__(self) -> None:
        self.known: list[weakref.ref[Tensor]] = []

    def note(self, parameters: list[Tensor]) -> None:
        """The gradients of these parameters were looked at: those that are not finite are known from now on."""
        self.known = [weakref.ref(p.grad) for p in parameters if p.grad is not None and not is_finite(p.grad)]

    def clear(self) -> None:
        """Gradients are finite: whatever was left there has been cleared."""
        self.known.clear()

    def forget_the_cleared(self) -> None:
        """Those that were zeroed in place since are finite now: what turns bad in them again is news."""
        self.known = [ref for ref in self.known if (gradient := ref()) is not None and not is_finite(gradient)]

    def are_all_that_is_bad(self, parameters: list[Tensor]) -> bool:
        """Whether every gradient of these parameters is finite or was known to be bad."""
        known = {id(gradient) for ref in self.known if (gradient := ref()) is not None}
        return bool(known) and all(id(p.grad) in known or is_finite(p.grad) for p in parameters if p.grad is not None)
