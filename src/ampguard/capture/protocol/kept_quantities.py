"""What is made of gradients that are still scaled and kept for later, until it becomes part of a loss.

Importance weights are such: elastic weight consolidation sums up squared gradients of one task and multiplies them in the
loss of the next one by how far the weights have moved. Squares of scaled gradients carry the square of the loss scale, and the
loss that they are part of is scaled once more. In iterations that are looked at closely the tensors are noted to which
something was added that carries the scale, and looked for in the graph of the losses that follow. Nothing is said where a
factor on the way may be the division by the scale, or where a norm may have been divided out.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.carried_over import became_bad
from ampguard.capture.protocol.copied_gradients import ratio_of
from ampguard.capture.protocol.gradients import SMALL, OptimizerWatch
from ampguard.capture.protocol.leaf_hooks import is_chosen
from ampguard.capture.protocol.own_moves import OwnMoves
from ampguard.capture.protocol.penalties import constants_of, may_divide, nodes_behind
from ampguard.capture.protocol.powers import Powers, Quantity
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.protocol.sums import Sums
from ampguard.capture.record import Line
from ampguard.compat import version_of
from ampguard.protocol.events import Breach

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Moves

MOST = 512
MOST_COPIES = 8
MOST_LINES = 4
"""Lines at which something was kept, whose use is looked for in the very next iteration."""
MAX_LOOKS = 24
"""Losses that are searched in a run."""
LOOKS_EACH = 8
"""Of one kind."""
MOST_KINDS = 4
"""Kinds of losses of which the first one is searched, whenever it comes."""
LAST_NODES = 3
FEWEST = 8
"""Elements that say something of a size."""
SMALLEST_SCALE = 64.0
APART = 16.0
"""By which factor a sum may have grown, or an average have changed, since it was last seen."""
WHOLE = 1e-5
"""How far a divisor may be from a whole number, as a share of it."""
_OPERANDS = ("self", "other", "tensor1", "tensor2", "mat2", "vec", "tensor")


@dataclass(slots=True)
class _Kept:
    """A tensor that carries S^`power`; `value`: as it was when last seen, where it is small."""

    ref: weakref.ref[Tensor]
    power: float
    scale: float
    watch: OptimizerWatch
    where: Line | None
    version: int
    value: Tensor | None = None
    times: int = 1
    """In how many windows something was added to it."""

    @classmethod
    def of(cls, tensor: Tensor, quantity: Quantity, scale: float) -> _Kept:
        return cls(quantity.ref, quantity.power, scale, quantity.watch, quantity.where, version_of(tensor))

    @property
    def factor(self) -> float:
        """By how much it is too large."""
        return float(self.scale**self.power)

    @property
    def most(self) -> float:
        """Numbers from there on may have the scale in them."""
        return float(max(self.factor, 1 / self.factor) ** 0.5)

    def keep(self) -> None:
        tensor = self.ref()
        if tensor is not None and tensor.numel() <= SMALL:
            with torch.no_grad(), compat.unseen():
                self.value = tensor.detach().clone()

    def carries_scale(self) -> bool:
        """Whether it is known that it still does: nobody has written to it, or it was divided by a number of batches."""
        tensor = self.ref()
        if tensor is None or version_of(tensor) == self.version:
            return tensor is not None
        by = ratio_of(self.value, tensor) if self.value is not None else None
        return by is not None and is_count(by, self.most)

    def goes_on(self) -> bool:
        """Whether it is still summed up: it has about the size that it had, and none that somebody has chosen."""
        tensor = self.ref()
        if tensor is None or self.value is None or self.value.shape != tensor.shape or self.times < 2:
            return False
        with torch.no_grad(), compat.unseen():
            now = tensor.detach().double()
            before, size = float(self.value.double().norm()), float(now.norm())
            chosen = [size, float(now.abs().max()), float(now.abs().sum()), float(now.abs().mean()), float(now.std())]
        return before > 0 and 1 / APART < size / before < APART and not any(map(is_chosen, chosen))


class KeptQuantities:
    """Follows them from the window in which they are made to the losses that they are part of."""

    def __init__(self, moves: Moves, own_moves: OwnMoves) -> None:
        self._moves = moves
        self._own_moves = own_moves
        self._sums: Sums | None = None
        """Those of the window that is open."""
        self.kept: dict[int, _Kept] = {}
        """What was kept that may yet become part of a loss, by the memory that it lies in."""
        self._lines: set[Line | None] = set()
        self._kinds: dict[tuple[str, ...], int] = {}
        """Kinds of losses, and how many of each were searched."""
        self._looks = 0
        self._has_told_of_sums = False

    # --- while a window is open -----------------------------------------------------------------------------------------

    def called(
        self,
        name: str,
        args: tuple[Any, ...],
        options: dict[str, Any],
        result: Any,
        powers: Powers,
        frame: FrameType | None,
    ) -> None:
        """The script has called an operator: does what it made carry the scale, as something that is summed up?"""
        if not args:
            return
        sums = self._sums_of(powers)
        self._own_moves.called(name, args, options, sums, frame)
        if len(sums.known) < MOST:
            sums.follow(name, args, result, lambda: script_line(frame))

    def taken(
        self, gradients: Iterable[tuple[Tensor, OptimizerWatch]], power: float, powers: Powers, where: Line | None
    ) -> None:
        """`torch.autograd.grad` has returned these gradients of parameters, which carry S^`power`."""
        sums = self._sums_of(powers)
        for gradient, watch in gradients:
            sums.note(gradient, power, watch, where)

    def _sums_of(self, powers: Powers) -> Sums:
        if self._sums is None:
            self._sums = Sums.of_window(powers)
            for kept in self.kept.values():
                tensor = kept.ref()
                if tensor is not None and version_of(tensor) == kept.version:
                    self._sums.carried_over.leave(tensor, kept.scale)
        return self._sums

    def window_closes(self, powers: Powers, is_told: bool) -> None:
        """What is left of it is kept; nothing where the script has asked for the scale (`is_told` is False)."""
        sums, self._sums = self._sums, None
        self._own_moves.window_closes(powers.scale, is_told)
        if sums is not None and is_told:
            self._judge_carried_over(sums)
        if sums is None or not is_told or powers.scale < SMALLEST_SCALE or self._looks >= MAX_LOOKS:
            return
        found = [_Kept.of(tensor, quantity, powers.scale) for tensor, quantity in sums.left()]
        self.kept = {key: kept for key, kept in self.kept.items() if kept.ref() is not None}
        for kept in found[: MOST - len(self.kept)]:
            self._keep(kept)
        lines = {kept.where for kept in found} - self._lines
        if lines and len(self._lines) < MOST_LINES:
            self._lines |= lines
            self._moves.second_looks.ask(*{kept.watch for kept in found})

    def _judge_carried_over(self, sums: Sums) -> None:
        """Are gradients that the scaler is about to divide sums with earlier ones, which carry another scale?"""
        moves = self._moves
        found = sums.carried_over.in_gradients(w for w in moves.mine() if moves.machine.stage(w).is_scaled)
        if found is None:
            return
        watch, parameters, each = found
        moves.sums_up_scaled = True
        if each.scale == sums.scale or self._has_told_of_sums:
            return
        with torch.no_grad(), compat.unseen():
            is_bad = became_bad(parameters, lambda p: moves.close.assigned.left_by_backward(watch, p))
        if is_bad is None:
            return  # an iteration in which the backward pass does not overflow will tell
        self._has_told_of_sums = True
        facts = {"scales": [each.scale, sums.scale], "kept": True, "not_finite": is_bad}
        factor = each.scale / sums.scale
        step = moves.second_looks.since(watch) if is_bad else moves.recorder.steps.count
        moves.tell([Breach("accumulation-broken", watch, None, each.where, each.where, factor, facts)], step)

    def _keep(self, kept: _Kept) -> None:
        tensor = kept.ref()
        key = compat.storage_key(tensor) if tensor is not None else 0
        known = self.kept.get(key)
        if known is not None and known.ref() is tensor and known.power == kept.power:
            kept.times = known.times + 1
        if (known is not None and known.value is not None) or len(self.kept) < MOST_COPIES:
            kept.keep()
        self.kept[key] = kept

    # --- what becomes of them -------------------------------------------------------------------------------------------

    def glance(self, losses: Any) -> None:
        """A usual iteration: is the loss of a new kind, with a term more perhaps?"""
        kind = _kind_of(losses)
        if kind not in self._kinds and len(self._kinds) < MOST_KINDS:
            self._kinds[kind] = 0
            self._moves.second_looks.ask(*self._moves.mine())

    def before_backward(self, losses: Any, gradients: Any, frame: FrameType | None) -> None:
        """Is one of them a factor in the loss that is about to be differentiated?"""
        scale, _ = self._moves.carried.scale_of(losses, gradients)
        if scale is None or not isinstance(losses, Tensor) or losses.grad_fn is None:
            return
        kind = _kind_of(losses)
        looks = self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if looks > LOOKS_EACH:
            return
        self._looks += 1
        with compat.unseen():
            kept = self._in_graph(losses)
        if kept is None or (kept.power == 1 and not self._moves.carried.is_scaled(losses)):
            return  # (what goes on from gradients that carry the scale need not be scaled itself)
        self._looks = MAX_LOOKS
        self.kept = {}
        facts = {"scale": kept.scale, "power": kept.power, "clips": True, "in_loss": True, "kept": True}
        where = script_line(frame)
        breach = Breach("clip-before-unscale", kept.watch, scale.watch, where, kept.where, kept.factor, facts)
        self._moves.tell([breach], self._moves.recorder.steps.count)

    def _in_graph(self, loss: Tensor) -> _Kept | None:
        """One that carries the scale still. Where the script has written to all of them unseen, none may contradict it."""
        found = list(self._reached(loss))
        known = next((kept for kept in found if kept.carries_scale()), None)
        large = [kept for kept in found if kept.value is not None and kept.value.numel() >= FEWEST]
        return known or (large[0] if large and all(kept.goes_on() for kept in large) else None)

    def _reached(self, loss: Tensor) -> Iterator[_Kept]:
        """Those on a way that passes no factor which may take the scale out. (That of the loss itself is none.)"""
        scaling = self._moves.carried.losses.nodes() | {id(loss.grad_fn)}
        for node in nodes_behind(loss, lambda node: id(node) in scaling or not self._takes_scale_out(node)):
            yield from (k for t in _constants(node) if (k := self.kept.get(compat.storage_key(t))) is not None)

    def _takes_scale_out(self, node: Any) -> bool:
        """Whether a factor may be a division by the scale, or by a norm of what carries it."""
        return any(
            may_divide(node, scale) or any(not 1 / most < abs(constant) < most for constant in constants_of(node))
            for scale, most in {(kept.scale, kept.most) for kept in self.kept.values()}
        )


def is_count(number: float, at_most: float) -> bool:
    """Whether it may be a number of batches: a whole one, and too small for the scale to be in it.

    >>> is_count(8.0, 4096.0), is_count(8.3, 4096.0), is_count(65536.0, 4096.0)
    (True, False, False)
    """
    return 0.5 < number <= at_most and abs(number / round(number) - 1.0) < WHOLE


def _kind_of(loss: Any) -> tuple[str, ...]:
    """The operators that have made it last, one behind the other."""
    node = loss.grad_fn if isinstance(loss, Tensor) else None
    names: list[str] = []
    while node is not None and len(names) < LAST_NODES:
        names.append(type(node).__name__)
        node = next((inner for inner, _ in node.next_functions), None)
    return tuple(names)


def _constants(node: Any) -> Iterator[Tensor]:
    """The tensors that an operator has saved and is not differentiated for."""
    if any(inner is None for inner, _ in node.next_functions):
        for name in _OPERANDS:
            saved = compat.saved_by(node, name)
            if saved is not None and not saved.requires_grad:
                yield saved
