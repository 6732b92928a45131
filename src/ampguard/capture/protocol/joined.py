"""Parameters that come to an optimizer with gradients of earlier iterations.

What no optimizer holds, no `optimizer.zero_grad()` clears: layers that are to be unfrozen later, and never had
`requires_grad_(False)`, pile up the gradients of every iteration till then. The first step after they have joined follows all
of them at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.moves import Frame, Moves
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.record import Line
from ampguard.numerics import is_finite
from ampguard.protocol.events import Breach

COMPARED = 4
"""Parameters of which a few gradient elements are kept, to see whether somebody clears them by hand."""
ELEMENTS = 256
WRITES = 3
"""To a gradient since it was made, at least: one iteration's may have been divided and clipped for another optimizer."""


@dataclass(frozen=True, slots=True)
class _Old:
    """A gradient as it was when its parameter joined."""

    parameter: weakref.ref[Tensor]
    gradient: weakref.ref[Tensor]
    values: Tensor

    def is_there(self) -> bool:
        """Whether nobody has cleared it since. Waits for the device."""
        parameter, gradient = self.parameter(), self.gradient()
        if parameter is None or gradient is None or parameter.grad is not gradient:
            return False
        return torch.equal(_some_of(gradient), self.values)


class JoinedParameters:
    """From the call that brings parameters to an optimizer to the next backward pass, which adds to what they hold."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._old: list[tuple[OptimizerWatch, list[_Old], int, Line | None]] = []

    @property
    def are_there(self) -> bool:
        return bool(self._old)

    def joined(self, optimizer: Optimizer, parameters: Iterable[Tensor], frame: Frame) -> None:
        """Called between two iterations: what has a gradient now has it from an earlier one."""
        if not self._moves.recorder.steps.count:
            return
        with torch.no_grad(), compat.unseen():
            held = [(p, p.grad) for p in parameters if p.grad is not None and _has_piled_up(p.grad)]
            old = [_Old(weakref.ref(p), weakref.ref(grad), _some_of(grad)) for p, grad in held[:COMPARED]]
            old = [one for one in old if bool(one.values.any()) and is_finite(one.values)]
        if old:
            self._old.append((self._moves.watches.optimizer(optimizer), old, len(held), script_line(frame)))
            if self._moves.routine.is_on:
                self._moves.routine.leave()

    def before_backward(self, frame: Frame) -> None:
        """A backward pass is about to add to them, if nobody has cleared them."""
        waiting, self._old = self._old, []
        for watch, old, count, where in waiting:
            with torch.no_grad(), compat.unseen():
                are_left = all(one.is_there() for one in old)
            if are_left:
                facts = {
                    "joined": count,
                    "parameters": [p for one in old if (p := one.parameter()) is not None],
                    "steps": 1,
                }
                breach = Breach("missing-zero-grad", watch, None, where, script_line(frame), None, facts)
                self._moves.tell([breach], self._moves.recorder.steps.count)


def _has_piled_up(gradient: Tensor) -> bool:
    is_plain = type(gradient) is Tensor and gradient.layout == torch.strided and compat.has_values(gradient)
    return is_plain and compat.version_of(gradient) >= WRITES


def _some_of(gradient: Tensor) -> Tensor:
    """A copy of elements from all over it."""
    flat = gradient.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)].clone()
