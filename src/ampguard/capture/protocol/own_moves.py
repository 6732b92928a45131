"""Weights that the script itself moves by something made of scaled gradients: a momentum of its own, an average.

`buf.mul_(0.9).add_(p.grad); p.sub_(lr * buf)`: the sum lies along no gradient, so what `own_updates` compares does not tell.
The powers of the scale do, as far as every number on the way is one that somebody has written down. In an update as Adam's
they cancel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.protocol.sums import Sums, is_free_of
from ampguard.capture.record import Line
from ampguard.protocol.events import Breach

if TYPE_CHECKING:
    from types import FrameType

    from ampguard.capture.protocol.moves import Moves
    from ampguard.capture.protocol.own_updates import OwnUpdates

MOVES = frozenset({"add_", "sub_", "__iadd__", "__isub__", "addcmul_", "addcdiv_", "_foreach_add_"})
"""Operators by which weights are moved in place."""
SIGNS = {"addcmul_": 1.0, "addcdiv_": -1.0}
"""Those that are given two operands: with which sign the power of the second one counts."""
MOST = 8


class OwnMoves:
    """Those of one window between a backward pass and the next call of the protocol."""

    def __init__(self, moves: Moves, own_updates: OwnUpdates) -> None:
        self._moves = moves
        self._own_updates = own_updates
        self._moved: list[tuple[Tensor, float, Line | None]] = []
        self._step = 0

    def called(
        self, name: str, args: tuple[Any, ...], options: dict[str, Any], sums: Sums, frame: FrameType | None
    ) -> None:
        """The script writes to a tensor: are these weights, and does what is added carry the scale?"""
        if name not in MOVES or len(args) < 2 or self._own_updates.has_told or len(self._moved) >= MOST:
            return
        target = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
        if not sums.is_weight(target):
            return
        power = _power(name, args, sums)
        number = options.get("alpha", options.get("value", 1.0))
        if not power or not is_free_of(number, sums.scale):
            return
        steps = self._moves.recorder.steps
        self._step = steps.count - steps.counts_backwards
        weight = sums.weight_of(target)
        self._moved += [(weight, power, script_line(frame))] if weight is not None else []

    def window_closes(self, scale: float, is_told: bool) -> None:
        """Tell it, unless the script has asked for the scale (`is_told` is False)."""
        moved, self._moved = self._moved, []
        if not moved or not is_told or self._own_updates.has_told:
            return
        self._own_updates.has_told = True
        last = self._moves.machine.last_backward
        _, power, where = moved[0]
        facts = {"own_update": True, "made_of_them": True, "parameters": [p for p, *_ in moved], "scale": scale}
        first = last.where if last is not None else None
        step = self._moves.second_looks.read_since(self._step, *self._moves.mine())
        self._moves.tell([Breach("bypassed-scaler", None, None, first, where, scale**power, facts)], step)


def _power(name: str, args: tuple[Any, ...], sums: Sums) -> float:
    """What is added carries; 0 where that is not known."""
    parts = [sums.of(part) for part in args[1 : 3 if name in SIGNS else 2]]
    if None in parts or len(parts) < 1 + (name in SIGNS):
        return 0.0
    powers = [part[0] for part in parts if part is not None]
    return powers[0] + (SIGNS[name] * powers[1] if name in SIGNS else 0.0)
