"""Weights that the script itself moves along gradients which are still scaled: `p -= lr * p.grad`.

In iterations that are looked at closely, a few parameters are copied with their gradients after the backward pass of a
scaled loss (or as `torch.autograd.grad` returns them), and compared once the iteration is over; those of an optimizer before
anybody divides their gradients or steps with them. A weight that has moved by a multiple of its gradient was updated by
hand; whether the scale was divided out first shows in the multiple: somebody has written the learning rate down, so it is a
round number, and the same number divided by 65536 is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.gradients import FEWEST, SMALL
from ampguard.capture.protocol.models import Models, unowned
from ampguard.capture.record import Line
from ampguard.compat import version_of
from ampguard.protocol.events import Breach

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Moves

MOST = 8
"""Parameters that are copied."""

FEWEST_ALIKE = 2
"""Of those that were moved, how many by the same round number tell, where others were not (a trust ratio for each layer)."""

FIRST_GRADS = 8
"""Calls of `torch.autograd.grad` after which something is copied: nothing tells when a loop without optimizers is known."""

SMALLEST_SCALE = 8.0
ALONG = 1e-3
"""How far a change may be from a multiple of the gradient, of its norm: it was rounded to the weights' precision."""

SAME = 1e-3
"""How near a number must be to a round one."""


@dataclass(slots=True)
class _Followed:
    """A parameter after the backward pass: as it was, and what it moves along."""

    parameter: Tensor
    version: int
    before: Tensor
    gradient: Tensor
    is_written: bool = False
    """Whether the script was seen to write to its memory."""

    def rate(self) -> float | None:
        """By how many times its gradient it was moved against it (negative: along it); None where it was not.

        Waits for the device.
        """
        may_be_same = not self.is_written and version_of(self.parameter) == self.version
        if may_be_same and (not self.parameter.is_cpu or torch.equal(self.parameter.detach(), self.before)):
            return None  # (on a device, what was written by `.data` was seen)
        change = (self.before.double() - self.parameter.detach().double()).flatten()
        g = self.gradient.double().flatten()
        square = float(g @ g)
        if not square or not bool(g.isfinite().all()) or not bool(change.isfinite().all()):
            return None
        rate = float(change @ g) / square
        return rate if rate and float((change - rate * g).norm()) <= ALONG * float(change.norm()) else None


class OwnUpdates:
    """Follows them from a backward pass to the end of its iteration."""

    def __init__(self, moves: Moves, models: Models) -> None:
        self._moves = moves
        self._models = models
        self._followed: list[_Followed] = []
        self._of_optimizers: list[_Followed] = []
        """The same of parameters that an optimizer holds, until it uses their gradients."""
        self._inputs: list[_Followed] = []
        """The same of inputs of modules that want a gradient and that no optimizer holds (a prompt)."""
        self._seen: tuple[float, int] | None = None
        """By how many times their gradients those were moved, and since which iteration."""
        self._scale = 1.0
        self._backward: Line | None = None
        self._step = 0
        self._lines: dict[int, Line | None] = {}
        """Where memory was written to that followed parameters lie in."""
        self.has_told = False
        self._grads_seen = 0

    @property
    def is_open(self) -> bool:
        return bool(self._followed or self._of_optimizers or self._inputs)

    def after_backward(self, scale: float, where: Line | None) -> None:
        """Copy some that no optimizer holds. An accumulation window begins anew with each of its backward passes."""
        self._followed, self._of_optimizers, self._inputs = [], [], []
        if self.has_told or scale < SMALLEST_SCALE:
            return
        held = self._held()
        found = unowned(self._models, held)
        self._follow([(p, p.grad) for p in found], scale, where)
        sampled = [p for watch in self._moves.mine() for p in watch.sample]
        owned = {id(p) for p in (*held, *found)}
        inputs = [p for p in self._models.plain_leaves() if id(p) not in owned]
        self._of_optimizers = [each for p in sampled if (each := _follow(p, p.grad))]
        self._inputs = [each for p in inputs[:MOST] if (each := _follow(p, p.grad))]
        self._lines |= {compat.storage_key(each.parameter): None for each in (*self._of_optimizers, *self._inputs)}
        steps = self._moves.recorder.steps
        self._step = steps.count - steps.counts_backwards  # where it stands for the step it has ended it

    def after_grad(self, inputs: Any, results: Any, scale: float, where: Line | None, step: int) -> None:
        """The same of what `torch.autograd.grad` has returned for `inputs`, in the first such calls of a run.

        `step`: the iteration in which it was called; the call itself may have ended it.
        """
        self._followed = []
        if self.has_told or scale < SMALLEST_SCALE or self._grads_seen >= FIRST_GRADS:
            return
        self._grads_seen += 1
        held = {id(p) for p in self._held()}
        wanted = (inputs,) if isinstance(inputs, Tensor) else inputs
        pairs = [(p, g) for p, g in zip(wanted, results, strict=False) if isinstance(p, Tensor) and p.is_leaf]
        self._follow([(p, g) for p, g in pairs if id(p) not in held], scale, where)
        of_optimizers = (each for p, g in pairs if id(p) in held and (each := _follow(p, g)) is not None)
        self._of_optimizers = list(islice(of_optimizers, MOST))
        self._lines |= {compat.storage_key(each.parameter): None for each in self._of_optimizers}
        self._step = step

    def _held(self) -> list[Tensor]:
        return [p for watch in self._moves.watches.optimizers for p in watch.parameters()]

    def _follow(self, pairs: Iterable[tuple[Tensor, Tensor | None]], scale: float, where: Line | None) -> None:
        self._followed += islice((each for p, g in pairs if (each := _follow(p, g)) is not None), MOST)
        self._lines = {compat.storage_key(each.parameter): None for each in self._followed}
        self._scale, self._backward = scale, where

    def wrote(self, target: object, where: Line | None) -> None:
        """The script writes to a tensor in place."""
        if isinstance(target, Tensor):
            key = compat.storage_key(target)
            if key in self._lines:
                self._lines[key] = self._lines[key] or where
                for each in (*self._followed, *self._of_optimizers, *self._inputs):
                    each.is_written = each.is_written or compat.storage_key(each.parameter) == key

    def settle(self) -> None:
        """The iteration is over, or it goes on to other gradients: were they moved along those that still carry the scale?"""
        self.before_optimizers()
        inputs, self._inputs = self._inputs, []
        self._twice(inputs)
        followed, self._followed = self._followed, []
        moved = [each for each in self._moved(followed) if each[1] > 0]
        if moved and not self.has_told:
            self._tell(moved, self._step)

    def before_optimizers(self) -> None:
        """The gradients of optimizers are about to be divided, stepped with, or added to: were their weights moved before?"""
        followed, self._of_optimizers = self._of_optimizers, []
        self._twice(followed)

    def _twice(self, followed: list[_Followed]) -> None:
        """Tell of those that were moved by the same number in two iterations.

        A step along a gradient of some length (SAM's) may be by a round number once, and is by another in the next iteration.
        """
        moved = self._moved(followed)
        if not moved or self.has_told:
            return
        mine, rate = self._moves.mine(), moved[0][1]
        if self._seen is not None and abs(rate / self._seen[0] - 1.0) < SAME:
            self._tell(moved, self._seen[1])
            return
        self._seen = rate, self._moves.second_looks.read_since(self._step, *mine)
        self._moves.second_looks.ask(*mine)

    def stepped(self) -> None:
        """An optimizer has stepped: what its closure has differentiated was moved by it."""
        self._of_optimizers = []

    def _moved(self, followed: list[_Followed]) -> list[tuple[Tensor, float]]:
        """Those that were moved along gradients that still carry the scale, and by how many times these: all that were."""
        if not followed or self._moves.scale_was_read:
            return []
        with torch.no_grad(), compat.unseen():
            moved = [(each.parameter, rate) for each in followed if (rate := each.rate()) is not None]
        is_asked = any(of.was_asked for of in self._moves.watches.scalers)
        scaled = [each for each in moved if is_round(each[1]) and not (is_asked and is_round(each[1] * self._scale))]
        alike = [each for each in scaled if abs(each[1] / scaled[0][1] - 1.0) < SAME]
        return scaled if len(scaled) == len(moved) else alike if len(alike) >= FEWEST_ALIKE else []

    def _tell(self, moved: list[tuple[Tensor, float]], step: int) -> None:
        self.has_told = True
        where = next((line for line in self._lines.values() if line is not None), None)
        facts = {"own_update": True, "parameters": [p for p, _ in moved], "rate": moved[0][1], "scale": self._scale}
        breach = Breach("bypassed-scaler", None, None, self._backward, where, self._scale, facts)
        self._moves.tell([breach], step)


def _follow(parameter: Tensor, gradient: Tensor | None) -> _Followed | None:
    """None for what is not plain, or large, or so small that whatever it is moved by lies along its gradient."""
    if type(gradient) is not Tensor or not FEWEST <= parameter.numel() <= SMALL or gradient.is_sparse:
        return None
    with torch.no_grad(), compat.unseen():
        copies = parameter.detach().clone(), gradient.detach().clone()
    return _Followed(parameter, version_of(parameter), *copies)


def is_round(number: float) -> bool:
    """Whether it has no more than two significant digits, as a learning rate that somebody has chosen.

    >>> is_round(0.0025), is_round(1.0000002e-3), is_round(1e-3 / 1024)
    (True, True, False)
    """
    return abs(number / float(f"{number:.1e}") - 1.0) < SAME
