"""Bad gradients of a loop that updates its parameters by hand, from a loss that it has multiplied by a scale of its own.

Does it make the update, or does it look at them first, as a scaler does, and skip the step? Nobody is called for either: the
parameters say so when the next backward pass begins, or those that it has in their place (`torch.where(ok, new, old)`). Until
then copies are kept, from which the step can be run again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.flags import is_immediate
from ampguard.capture.record import BadResult


class UpdateByHand:
    """An update that is to be made by hand of bad gradients, or that is to be skipped."""

    def __init__(self, report: Callable[[BadResult], None]) -> None:
        self.waiting: tuple[BadResult, list[tuple[Tensor, Tensor]]] | None = None
        """The gradients, and the parameters with what they are before that update."""
        self.inputs: Sequence[Tensor] = ()
        """By what the running backward pass differentiates, where it returns its gradients."""
        self._report = report
        self._is_functional = False
        """Whether the update may make new tensors in place of these."""
        self._has_skipped = False

    def differentiates(self, inputs: Any) -> None:
        """A backward pass begins, of `inputs` where it returns its gradients."""
        self.inputs = () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        if self.waiting is not None:
            self.read(self.inputs)

    def begins(self, bad: BadResult, parameters: Iterable[Tensor]) -> None:
        """`parameters`: all that it may change."""
        self._begins(bad, [p for p in parameters if p.grad is not None], is_functional=False)

    def begins_functional(self, bad: BadResult) -> None:
        """The gradients were returned."""
        self._begins(bad, list(map(compat.without_transforms, self.inputs)), is_functional=True)

    def _begins(self, bad: BadResult, parameters: list[Tensor], is_functional: bool) -> None:
        self.read()
        if not bad.is_own_scale or not parameters or not all(map(is_immediate, parameters)):
            self._report(bad)
            return
        with torch.no_grad(), compat.unseen():
            self.waiting = bad, [(p, p.detach().clone()) for p in parameters]
        self._is_functional = is_functional

    def read(self, inputs: Sequence[Tensor] | None = None) -> None:
        """Tell of what was waiting: the update is over, or there was none. `inputs`: by what is differentiated next."""
        if self.waiting is None:
            return
        (bad, weights), self.waiting = self.waiting, None
        with torch.no_grad(), compat.unseen():
            changed = [(p, before) for p, before in weights if not torch.equal(p.detach(), before)]
            is_skipped = not changed and (not self._is_functional or self._are_the_same(weights, inputs))
        if is_skipped:
            self._has_skipped = True
            bad = dataclasses.replace(bad, is_held_off=True, is_passed_over=True)
        self._report(dataclasses.replace(bad, weights=tuple(changed)))

    def _are_the_same(self, weights: list[tuple[Tensor, Tensor]], inputs: Sequence[Tensor] | None) -> bool:
        """Whether the next step has the same weights. At the end of the run: whether an earlier one had."""
        if inputs is None or len(inputs) != len(weights):
            return self._has_skipped
        now = map(compat.without_transforms, inputs)
        return all(torch.equal(p.detach(), before) for p, (_, before) in zip(now, weights, strict=True))
