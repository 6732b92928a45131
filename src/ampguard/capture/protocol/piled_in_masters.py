"""Gradients that a script adds to those of its masters and never clears there: `model.zero_grad()` clears the model's own.

A loop in the old way of mixed precision copies the model's gradients to float32 masters, which the optimizer holds. Where it
adds them instead, somebody has to clear the masters' too. In the first steps of a run a few small gradients of the model are
copied, and looked for in what the masters' gradients have grown by since the step before: a gradient that is the model's
beside what an earlier step has used already is about to pile up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.protocol.copied_gradients import LooseGradients, SourceGradient, ratio_of
from ampguard.capture.protocol.gradients import SMALL, OptimizerWatch
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.record import Line
from ampguard.protocol.events import Breach
from ampguard.protocol.machine import PILED_STEPS

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Frame, Moves

LOOKS = 8
"""Backward passes that are looked at; several make no step of this kind."""
MOST = 8
"""Gradients of masters that are copied."""


@dataclass(slots=True)
class _Used:
    """A master's gradient, as an optimizer's step has used it, and the model's that it was made from."""

    master: weakref.ref[Tensor]
    gradient: Tensor
    copy: Tensor
    source: int
    """The parameter of the model, by identity."""


class PiledInMasters:
    """Looks behind each of the first backward passes, and before the step that follows."""

    def __init__(self, moves: Moves) -> None:
        self.is_over = False
        self.roots: Callable[[], Iterable[Iterable[Tensor]]] = tuple
        """The parameters of each module that was called."""
        self._moves = moves
        self._looks = 0
        self._loose: LooseGradients | None = None
        self._used: list[_Used] = []
        self._in_a_row = 0

    def after_backward(self, reached: tuple[OptimizerWatch, ...], where: Line | None) -> None:
        """Keep what it has left, if no optimizer holds that."""
        self._looks += 1
        is_second = self._loose is not None
        if reached or is_second or self._looks > LOOKS or self._moves.recorder.steps.counts_backwards:
            self._end()
            return
        self._loose = LooseGradients.of(self.roots(), 1.0, where)

    def before_step(self, optimizer: Optimizer, frame: Frame) -> None:
        """Are the gradients that are about to be used those of this pass alone?"""
        loose, self._loose = self._loose, None
        if loose is None:
            return
        masters = [p for group in optimizer.param_groups for p in group["params"] if _is_small(p)][:MOST]
        sources = {id(p): source for source in loose.sources if (p := source.parameter()) is not None}
        with torch.no_grad(), compat.unseen():
            piled = [master for used in self._used if (master := _piled(used, sources)) is not None]
            if self._used and len(piled) < len(self._used):
                self._end()
                return
            self._in_a_row += bool(piled)
            if self._in_a_row >= PILED_STEPS:
                self._end()
                self._tell(optimizer, piled, loose.where, script_line(frame))
                return
            used = self._used or _made_of(masters, sources)
            self._used = [_as_used(each) for each in used]
        if not self._used:
            self._end()

    def _end(self) -> None:
        self.is_over, self._loose, self._used = True, None, []

    def _tell(self, optimizer: Optimizer, masters: list[Tensor], where: Line | None, stepped: Line | None) -> None:
        watch = self._moves.watches.optimizer(optimizer)
        facts = {"steps": self._in_a_row, "in_masters": True, "parameters": masters}
        breach = Breach("missing-zero-grad", watch, None, where, stepped, None, facts)
        self._moves.tell([breach], self._moves.recorder.steps.count)


def _made_of(masters: list[Tensor], sources: dict[int, SourceGradient]) -> list[_Used]:
    """The masters whose gradient is one of these, each of another."""
    found: dict[int, _Used] = {}
    for master in masters:
        grad = master.grad
        for key, source in sources.items():
            if grad is None or key in found or grad.numel() != source.kept.numel() or id(master) == key:
                continue
            if ratio_of(source.kept, grad) is not None:
                found[key] = _Used(weakref.ref(master), grad, grad, key)
                break
    return list(found.values())


def _as_used(used: _Used) -> _Used:
    return _Used(used.master, used.gradient, used.gradient.detach().clone(), used.source)


def _piled(used: _Used, sources: dict[int, SourceGradient]) -> Tensor | None:
    """The master, if its gradient is what was used before and the model's of now."""
    master, source = used.master(), sources.get(used.source)
    if master is None or source is None or master.grad is not used.gradient or not bool(used.copy.any()):
        return None
    is_sum = ratio_of(source.kept, master.grad - used.copy) is not None and ratio_of(source.kept, master.grad) is None
    return master if is_sum else None


def _is_small(parameter: Tensor) -> bool:
    grad = parameter.grad
    return type(grad) is Tensor and compat.is_dense(grad) and grad.numel() <= SMALL
