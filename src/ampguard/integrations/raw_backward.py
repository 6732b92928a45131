"""`loss.backward()` of a loss that was not scaled, in the place of the framework's own call.

Seen where it happens, by a hook on a sample of each optimizer's parameters; told when an optimizer is to step on what it
left, for a backward pass whose gradients are thrown away (an adversarial input, the first half of SAM) is no mistake.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard.engine.misuse import Line
from ampguard.integrations.users_line import users_line

SAMPLE = 64
"""Parameters of an optimizer that are watched. A loss reaches some of them, or the optimizer is not what it trains."""


class RawBackwards:
    """Which optimizers hold gradients of a loss that was not scaled, and the line where they came from."""

    def __init__(self) -> None:
        self._scaled = 0
        self._is_scaled_by_hand = False
        self._lines: dict[int, Line | None] = {}
        self._handles: dict[int, list[Any]] = {}

    def watch(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Once per optimizer. Costs a call for each watched parameter in every backward pass."""
        if id(optimizer) in self._handles:
            return
        learning = [p for p in parameters if p.requires_grad and p.is_leaf]
        sample = learning[:: -(-len(learning) // SAMPLE) or 1]

        def reached(_: Tensor) -> None:
            if not self._scaled and not self._is_scaled_by_hand:
                self._lines.setdefault(id(optimizer), users_line())

        self._handles[id(optimizer)] = [p.register_post_accumulate_grad_hook(reached) for p in sample]

    @contextlib.contextmanager
    def scaled(self) -> Iterator[None]:
        """A backward pass of a scaled loss."""
        self._scaled += 1
        try:
            yield
        finally:
            self._scaled -= 1

    def scaled_begins(self, _: Tensor) -> None:
        """A hook on a scaled loss, for `scaler.scale(loss).backward()` in the script itself; holds until a step."""
        self._is_scaled_by_hand = not self._scaled

    def are_held(self, optimizer: Optimizer) -> bool:
        """Whether its gradients came, in part at least, from a loss that was not scaled."""
        return id(optimizer) in self._lines

    def line(self, optimizer: Optimizer) -> Line | None:
        return self._lines.get(id(optimizer))

    def look_again(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Somebody may have cleared such gradients since. Reads them, where there are any."""
        if self.are_held(optimizer):
            gradients = [p.grad for p in parameters if p.grad is not None]
            if not any(bool(torch.count_nonzero(g.detach())) for g in gradients):
                self.forget(optimizer)

    def forget(self, optimizer: Optimizer) -> None:
        """Its gradients were used or cleared."""
        self._lines.pop(id(optimizer), None)
        self._is_scaled_by_hand = False

    def leave(self, optimizer: Optimizer) -> None:
        """Take the hooks off again."""
        self.forget(optimizer)
        for handle in self._handles.pop(id(optimizer), []):
            handle.remove()
