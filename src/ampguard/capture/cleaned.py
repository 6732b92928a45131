"""Bad gradients in whose place a script puts finite ones before an optimizer uses them, where no scaler looks.

`nan_to_num_`, a mask, zeros: the training goes on, and nothing shows. In the first passes all gradients are looked at
behind the backward pass. Later a few are, where the loop was seen to write to them by itself; of any other loop it is only
noted how often a few were written to, until it is used: what was never done before may have been done for a reason.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from threading import get_ident
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from ampguard.compat import version_of
from ampguard.numerics import all_finite_on_cpu, is_finite

FIRST_USES = 8
"""Uses by an optimizer in which it is seen what the loop does to its gradients."""

SAMPLE = 3
"""Parameters that stand for all of an optimizer's."""

SMALL = 1 << 16
"""Elements up to which a gradient stands for others."""

MOST_LOOPS = 8
"""Optimizers that are followed: those that were begun with last."""


class Loop:
    """What is done to the gradients of one optimizer, between the backward pass and its step."""

    __slots__ = ("is_of_masters", "left", "optimizer", "sample", "thread", "uses", "usual", "writes")

    def __init__(self, optimizer: Optimizer, of_modules: Sequence[Tensor]) -> None:
        self.optimizer = weakref.ref(optimizer)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        held = [p for p in held if p.is_leaf and p.grad is not None and p.grad.numel() <= SMALL and p.grad.is_cpu]
        last = len(held) - 1
        chosen = sorted({round(last * k / (SAMPLE - 1)) for k in range(SAMPLE)}) if held else []
        self.sample = [weakref.ref(held[i]) for i in chosen]
        self.is_of_masters = are_masters([held[i] for i in chosen], set(map(id, of_modules)))
        """Whether no backward pass reaches them: what is bad behind one was left there by the script before it."""
        self.thread = get_ident()
        """Whose optimizer it is. In another's, autograd's engine may be writing to `.grad` without the interpreter's lock."""
        self.uses = 0
        self.usual: set[int] = set()
        """How often one of them was written to; -1: it was another tensor."""
        self.writes = False
        """Somebody other than PyTorch's clipping was seen to write to them, or has done what was never done before."""
        self.left: list[tuple[int, int] | None] = []
        """Those that stand for all behind the last backward pass: identity and version."""

    def note(self) -> None:
        """A backward pass has ended."""
        self.left = [
            (id(gradient), version_of(gradient))
            if (parameter := ref()) is not None and (gradient := parameter.grad) is not None
            else None
            for ref in self.sample
        ]

    def changes(self) -> Iterator[int]:
        """How often each was written to since."""
        for ref, left in zip(self.sample, self.left, strict=False):
            parameter = ref() if left is not None else None
            if parameter is not None and left is not None:
                gradient = parameter.grad
                yield version_of(gradient) - left[1] if gradient is not None and id(gradient) == left[0] else -1

    def learn(self, is_clipped: bool) -> None:
        """What is done in one of the first steps is usual."""
        for changes in self.changes():
            self.usual.add(changes)
            self.writes = self.writes or changes < 0 or changes > is_clipped

    def gradients(self) -> list[Tensor]:
        """Those that stand for all."""
        held = [parameter for ref in self.sample if (parameter := ref()) is not None]
        return [p.grad for p in held if p.grad is not None]


def are_masters(held: Sequence[Tensor], of_modules: Set[int]) -> bool:
    """Whether parameters of an optimizer are none of the modules that were called (these by identity), where there are such."""
    return bool(held) and bool(of_modules) and of_modules.isdisjoint(map(id, held))


class CleanedGradients:
    """Knows which gradients were not finite behind the last backward pass."""

    def __init__(self) -> None:
        self._loops: dict[int, Loop] = {}
        """By the optimizer's identity."""
        self._bad: set[int] = set()
        """By the parameter's identity."""

    def differentiated(self, parameters: Sequence[Tensor]) -> None:
        """A backward pass has ended; `parameters`: all that it may have reached, in the first passes."""
        if self._bad:
            self._bad = set()
        if parameters:
            self._look([p for p in parameters if p.is_leaf and p.grad is not None])
        me = get_ident()
        for loop in self._loops.values():
            if loop.thread != me:
                loop.left = []
                continue
            loop.note()
            if loop.writes and not loop.is_of_masters and not parameters and not all_finite_on_cpu(loop.gradients()):
                self._bad |= {id(p) for ref in loop.sample if (p := ref()) is not None}

    def _look(self, parameters: list[Tensor]) -> None:
        if not all_finite_on_cpu([p.grad for p in parameters if p.grad is not None]):
            bad = (p for p in parameters if p.grad is not None and p.grad.is_cpu and not is_finite(p.grad))
            self._bad = set(map(id, bad))

    def are_used(
        self, optimizer: Optimizer, is_clipped: bool, of_modules: Callable[[], Sequence[Tensor]]
    ) -> Literal["", "seen", "supposed"]:
        """An optimizer is about to use finite gradients. Were they not finite behind the backward pass?

        That was seen; or it is supposed, because something was done to them which this loop has never done. `is_clipped`:
        nobody has written to them since PyTorch's clipping has, or since they were looked at. `of_modules`: the parameters
        of the modules that were called.
        """
        loop = self._loops.get(id(optimizer))
        if loop is None or loop.optimizer() is not optimizer:
            loop = self._begin(optimizer, of_modules())
        elif loop.thread != (me := get_ident()):
            loop.thread, loop.left = me, []
        elif loop.uses < FIRST_USES:
            loop.learn(is_clipped)
        elif not loop.writes and not loop.usual.issuperset(loop.changes()):
            loop.writes = True
            return "supposed"
        loop.uses += 1
        return "seen" if self._bad and self._are_clean(optimizer, loop) else ""

    def _begin(self, optimizer: Optimizer, of_modules: Sequence[Tensor]) -> Loop:
        alive = [(key, loop) for key, loop in self._loops.items() if loop.optimizer() is not None]
        self._loops = dict(alive[1 - MOST_LOOPS :])
        loop = self._loops[id(optimizer)] = Loop(optimizer, of_modules)
        return loop

    def _are_clean(self, optimizer: Optimizer, loop: Loop) -> bool:
        were_bad = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._bad]
        self._bad = set()
        are_clean = bool(were_bad) and all(p.grad is None or is_finite(p.grad) for p in were_bad)
        loop.writes = loop.writes or are_clean  # (not every write is counted)
        return are_clean
