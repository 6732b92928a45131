"""Gradients that a loop without an optimizer never clears: `p -= lr * p.grad`, and backward adds to `p.grad` once more.

In the first backward passes of a run a few of the weights that the loss rests on are copied with their gradients, and compared
before the next one that reaches them: a weight that was moved, and whose gradient is still that of before, is about to pile
them up. (Of several models that are trained in turn, each may clear its own when its turn comes.)

So it is with replicas whose gradients are averaged for the model that an optimizer holds, and which are given its weights anew
in each round: the optimizer clears those of its own model alone. Here no backward pass reaches what an optimizer holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.flags import is_immediate
from ampguard.capture.protocol.gradients import SMALL
from ampguard.capture.record import GlueOp, Line
from ampguard.protocol.events import Breach
from ampguard.protocol.machine import PILED_STEPS

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Moves

MOST = 3
"""Weights that are copied."""
LOOKS = 12
"""Backward passes that are looked at."""
MAX_NODES = 4096
"""Of a graph, in which weights are looked for."""


@dataclass(slots=True)
class _Left:
    """A weight and its gradient as a backward pass left them."""

    weight: weakref.ref[Tensor]
    value: Tensor
    gradient: Tensor
    copy: Tensor

    def is_used_and_kept(self) -> bool:
        """Whether the weight has moved since, and its gradient is what it was."""
        weight = self.weight()
        if weight is None or weight.grad is not self.gradient or torch.equal(weight.detach(), self.value):
            return False
        return bool(self.copy.any()) and torch.equal(self.gradient, self.copy)


class PiledByHand:
    """Looks before and after each of the first backward passes."""

    def __init__(self, moves: Moves) -> None:
        self.is_over = False
        self._moves = moves
        self._looks = 0
        self._in_a_row = 0
        self._weights: list[weakref.ref[Tensor]] = []
        self._left: list[_Left] = []

    def before_backward(self, tensors: Any) -> None:
        """Was what the last backward pass left used, and never cleared?"""
        steps = self._moves.recorder.steps
        self._looks += 1
        last = self._moves.machine.last_backward
        is_by_optimizers = not steps.counts_backwards and last is not None and bool(last.reached)
        if is_by_optimizers or self._looks > LOOKS:
            self.is_over, self._left = True, []
            return
        losses = (tensors,) if isinstance(tensors, Tensor) else tensors
        reached = _leaves_behind(losses)
        if not steps.counts_backwards:
            reached = [leaf for leaf in reached if not steps.is_held(leaf)]
        known = set(map(id, reached))
        left = [each for each in self._left if id(each.weight()) in known]
        self._left = [each for each in self._left if each.weight() is not None and id(each.weight()) not in known]
        with torch.no_grad(), compat.unseen():
            kept = [each for each in left if each.is_used_and_kept()]
        if left:
            self._in_a_row = self._in_a_row + 1 if len(kept) == len(left) else 0
        if self._in_a_row >= PILED_STEPS:
            self.is_over = True
            self._tell([weight for each in kept if (weight := each.weight()) is not None])
            return
        self._weights = [weakref.ref(weight) for weight in reached]

    def after_backward(self) -> None:
        """Copy what it has left."""
        weights, self._weights = [weight for ref in self._weights if (weight := ref()) is not None], []
        with torch.no_grad(), compat.unseen():
            for weight in weights:
                grad = weight.grad
                if type(grad) is Tensor and compat.is_dense(grad):
                    self._left.append(_Left(weakref.ref(weight), weight.detach().clone(), grad, grad.clone()))

    def _tell(self, weights: Sequence[Tensor]) -> None:
        recorder, last = self._moves.recorder, self._moves.machine.last_backward
        where = last.where if last is not None else None
        is_replica = not recorder.steps.counts_backwards
        facts = {"steps": self._in_a_row, "by_hand": True, "in_replicas": is_replica, "parameters": list(weights)}
        breach = Breach("missing-zero-grad", None, None, where, self._written_at(weights) or where, None, facts)
        self._moves.tell([breach], recorder.steps.count)

    def _written_at(self, weights: Iterable[Tensor]) -> Line | None:
        """The line that has moved them last, where it was recorded."""
        memory = {compat.storage_key(weight) for weight in weights} - {0}
        record = self._moves.recorder.log.slice()
        for event in reversed(record.events):
            if isinstance(event, GlueOp) and event.args and 0 in compat.positions_written(event.func):
                target = record.tensor_behind(event.args[0])
                if target is not None and compat.storage_key(target) in memory:
                    return event.line
        return None


def _leaves_behind(losses: Iterable[Any]) -> list[Tensor]:
    """A few weights that the graph of these ends at, small ones that one need not wait for."""
    stack = [loss.grad_fn for loss in losses if isinstance(loss, Tensor)]
    found: list[Tensor] = []
    seen: set[Any] = set()
    while stack and len(found) < MOST and len(seen) < MAX_NODES:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and leaf.numel() <= SMALL and compat.is_dense(leaf) and is_immediate(leaf):
            found.append(leaf)
        stack += [inner for inner, _ in node.next_functions]
    return found
