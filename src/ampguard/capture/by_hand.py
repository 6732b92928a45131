"""Bad gradients of a loop that updates its parameters by hand, from a loss that it has multiplied by a scale of its own.

Does it make the update, or does it look at them first, as a scaler does, and skip the step? Nobody is called for either: the
parameters say so when the next backward pass begins. Until then copies of them are kept, from which the step can be run again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ampguard.capture.flags import is_immediate
from ampguard.capture.record import BadResult


class UpdateByHand:
    """An update that is to be made by hand of bad gradients, or that is to be skipped."""

    def __init__(self, report: Callable[[BadResult], None]) -> None:
        self.waiting: tuple[BadResult, list[tuple[Tensor, Tensor]]] | None = None
        """The gradients, and the parameters with what they are before that update."""
        self._report = report

    def begins(self, bad: BadResult, parameters: Iterable[Tensor]) -> None:
        """`parameters`: all that it may change."""
        self.read()
        updated = [p for p in parameters if p.grad is not None]
        if not bad.is_own_scale or not updated or not all(map(is_immediate, updated)):
            self._report(bad)
        else:
            self.waiting = bad, [(p, p.detach().clone()) for p in updated]

    def read(self) -> None:
        """Tell of what was waiting. The update is over, or there was none."""
        if self.waiting is None:
            return
        (bad, weights), self.waiting = self.waiting, None
        changed = [(p, before) for p, before in weights if not torch.equal(p.detach(), before)]
        if changed:
            bad = dataclasses.replace(bad, weights=tuple(changed))
        else:
            bad = dataclasses.replace(bad, is_held_off=True, is_passed_over=True)
        self._report(bad)
