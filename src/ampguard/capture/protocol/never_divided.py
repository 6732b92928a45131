"""A loss scale of the script's own that nothing ever divides by again.

What a loss is multiplied by may mean anything. It is a loss scale where it is a large power of two (the exponent may grow by
thousandths) and something in the loss was computed in float16, which is what loss scales are for. Gradients that are found as
the backward pass has left them when an optimizer of PyTorch's steps, in one look after the other, still carry it. Nothing is
said where a division may stand elsewhere: in a hook, in the graph, in the optimizer, in its learning rate, in a limit on the
gradients' norm; nor where the factor may be a number of samples.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.judging.own_scale import SMALLEST_POWER
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.loss_scale import SCALING, constants_around
from ampguard.capture.protocol.penalties import constants_of, holds_scale, may_divide, nodes_behind

SAME = 1e-2
EXACT = 1e-4
FEWEST_LOOKS = 2
"""Steps in which gradients were seen to carry it, before it is told."""


@dataclass(slots=True)
class _Carried:
    """`since`: the first iteration in which an optimizer stepped with it. `is_divided`: another one has taken it out."""

    since: int
    looks: int = 0
    is_divided: bool = False


class NeverDivided:
    """Of each optimizer: in how many looks were its gradients undivided?"""

    def __init__(self) -> None:
        self._carried: weakref.WeakKeyDictionary[OptimizerWatch, _Carried] = weakref.WeakKeyDictionary()

    def stepping(self, watch: OptimizerWatch, scale: float, ratio: float | None, step: int) -> int | None:
        """An optimizer is about to step with gradients that were divided by `ratio` (None: nobody knows) since a loss times
        `scale`, a loss scale, was differentiated. The iteration since which nothing has divided, once that is certain."""
        carried = self._carried.setdefault(watch, _Carried(step))
        carried.is_divided |= ratio is not None and abs(ratio - 1.0) > SAME
        optimizer = watch.ref()
        if carried.is_divided or ratio is None or optimizer is None or _may_divide(optimizer, scale):
            return None
        carried.looks += 1
        return carried.since if carried.looks >= FEWEST_LOOKS else None


def is_loss_scale(loss: Tensor, factor: float) -> bool:
    """Whether a constant by which a loss was multiplied is there to keep float16's gradients from becoming 0, and nothing
    takes it out within the backward pass."""
    if not is_power_of_two(factor) or constants_around(loss, factor) < SMALLEST_POWER:
        return False
    with compat.unseen():
        shape = compat.shape_behind(loss, SCALING)
        if factor in (shape.numel(), *shape[:1]) or compat.first_node_of([loss], torch.float16) is None:
            return False
        leaves = compat.leaves_behind([loss])
        if any(compat.hooks_of_leaf(leaf) or compat.hooks_behind_leaf(leaf) for leaf in leaves):
            return False
        return not any(
            may_divide(node, factor) for node in nodes_behind(loss, lambda _: True) if not _multiplies(node, factor)
        )


def is_power_of_two(factor: float) -> bool:
    """Whether it is a large one, or one whose exponent grows by a written number (`2 ** (20 + 0.001 * step)`).

    >>> is_power_of_two(65536.0), is_power_of_two(2**20.003), is_power_of_two(1000.0), is_power_of_two(16.0)
    (True, True, False, False)
    """
    if not SMALLEST_POWER <= factor < math.inf:
        return False
    thousandths = 1000 * math.log2(factor)
    return abs(thousandths - round(thousandths)) < EXACT


def _multiplies(node: Any, factor: float) -> bool:
    return type(node).__name__ in SCALING and factor in constants_of(node)


def _may_divide(optimizer: torch.optim.Optimizer, scale: float) -> bool:
    """Whether its step may divide by the scale, or have its learning rate divided by it."""
    if not compat.is_of_pytorch(type(optimizer)) or compat.is_preceded(optimizer):
        return True
    if getattr(optimizer, "grad_scale", None) is not None:
        return True
    return any(holds_scale(float(group.get("lr", 1.0)), scale) for group in optimizer.param_groups)
