"""What carries no loss scale, added by the script to gradients that carry it: a weight decay, a pull to other weights, noise.

The scaler divides the sum, and with it what was of the right size: the decay is 65536 times weaker than it was written.
Where it was multiplied by the scale first, the powers say so; where by a number that they do not know (one that was read from
the gradients), nothing is said.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.powers import Powers
from ampguard.capture.record import Line

IN_PLACE = frozenset({"add_", "__iadd__", "sub_", "__isub__", "_foreach_add_"})
ADDS = IN_PLACE | {"add", "__add__", "__radd__", "sub", "__sub__"}
MOST_IN_HOOKS = 32
STRONGEST = 1.0
"""Nobody lets weights decay by all of themselves: a larger multiple of them has the scale in it."""


@dataclass(slots=True, eq=False)
class PlainPart:
    """`where`: the line that added it. `sum`: the new tensor; None where a gradient was changed in place."""

    watch: OptimizerWatch
    where: Line | None
    sum: weakref.ref[Tensor] | None = None
    in_hook: bool = False

    @property
    def is_in_gradient(self) -> bool:
        """Whether it was added to what an optimizer's parameter holds as its gradient now."""
        result = self.sum() if self.sum is not None else None
        return self.sum is None or any(p.grad is result for p in self.watch.parameters() if result is not None)


@dataclass(slots=True)
class PlainParts:
    """Those of one window between a backward pass and the next call of the protocol."""

    found: list[PlainPart] = field(default_factory=list)
    in_hooks: list[tuple[OptimizerWatch, Line | None, Tensor]] = field(default_factory=list)
    """Sums that hooks on parameters have made, and copies of them: what a hook returns does not stay the same tensor."""
    numbers_are_known: bool = True
    """No number was read from what may carry the scale, by which a weight could have been multiplied since."""

    def read(self, value: Any, powers: Powers) -> None:
        """A number leaves PyTorch. Of a loss, before it is differentiated, it carries no scale."""
        known = powers.of(value)
        self.numbers_are_known &= bool(value.requires_grad if known is None else not known[0])

    def is_one(self, name: str, args: tuple[Any, ...], alpha: Any, powers: Powers) -> OptimizerWatch | None:
        """Whose gradients are one side of this sum, with something of no scale on the other."""
        if name not in ADDS or len(args) < 2 or not self.numbers_are_known:
            return None
        sides = [powers.of(arg) for arg in args[:2]]
        if None in sides or sorted(side[0] for side in sides if side is not None) != [0.0, 1.0]:
            return None
        scaled, plain = args[:2] if sides[0] is not None and sides[0][0] else args[1::-1]
        if isinstance(scaled, (list, tuple)):
            scaled, plain = scaled[0], plain[0] if isinstance(plain, (list, tuple)) else plain
        if not isinstance(plain, Tensor) or plain.shape != scaled.shape:
            return None
        watch = next(side[1] for side in sides if side is not None and side[0])
        return watch if powers.times_weights(plain, watch) * abs(float(alpha)) < STRONGEST else None

    def add_in_hook(self, watch: OptimizerWatch, where: Line | None, result: Any) -> None:
        if isinstance(result, Tensor) and len(self.in_hooks) < MOST_IN_HOOKS:
            with torch.no_grad():
                self.in_hooks.append((watch, where, result.detach().clone()))

    def hooks_left(self, gradients: Sequence[Tensor]) -> None:
        """The backward pass is over: what its hooks have made of gradients."""
        for watch, where, made in self.in_hooks:
            is_one = any(left.shape == made.shape and torch.equal(left, made) for left in gradients)
            if is_one and not any(part.watch is watch and part.in_hook for part in self.found):
                self.found.append(PlainPart(watch, where, in_hook=True))
        self.in_hooks = []

    def add(self, watch: OptimizerWatch, where: Line | None, result: Any, changes_gradient: bool) -> None:
        if not changes_gradient:
            results = result if isinstance(result, (list, tuple)) else (result,)
            self.found += [PlainPart(watch, where, weakref.ref(each)) for each in results if isinstance(each, Tensor)]
        elif not any(part.watch is watch and part.where == where and part.sum is None for part in self.found):
            self.found.append(PlainPart(watch, where))
