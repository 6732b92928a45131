"""A scaler that is made anew before it has come down: what its update lowers is thrown away, and every step is skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.loss_scale import DeviceScale
from ampguard.capture.protocol.watches import ScalerWatch
from ampguard.protocol.events import Breach

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Moves

SKIPS = 8
"""Steps in a row that were skipped: a scaler that is left alone lowers its scale by a factor of 256 in as many."""
RENEWALS = 2


@dataclass(slots=True)
class _Row:
    """Skipped steps of one optimizer, with none made since."""

    of: ScalerWatch
    scale: DeviceScale
    """Of the first of them."""
    taken: int
    steps: int
    attempt: int
    renewals: int = 0


class RenewedScalers:
    """Follows the optimizers whose steps are skipped; asked only of steps that are not as usual, as the first of a scaler."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._rows: WeakKeyDictionary[OptimizerWatch, _Row] = WeakKeyDictionary()

    def stepped(self, of: ScalerWatch, watch: OptimizerWatch) -> None:
        """A scaler has made or skipped an optimizer's step."""
        row = self._rows.get(watch)
        if not watch.was_skipped or (row is not None and row.taken != watch.taken):
            self._rows.pop(watch, None)
            row = None
        if not watch.was_skipped:
            return
        if row is None:
            self._rows[watch] = _Row(of, of.current_scale(), watch.taken, watch.steps - 1, self._moves.attempt)
        elif row.of is not of:
            row.of = of
            row.renewals += 1
            self._renewed(row, watch)

    def _renewed(self, row: _Row, watch: OptimizerWatch) -> None:
        of, skipped, scale = row.of, watch.steps - row.steps, row.of.current_scale()
        if row.renewals < RENEWALS or skipped < SKIPS or not of.is_own or float(scale) < float(row.scale):
            return
        facts: dict[str, Any] = {"renewed": row.renewals, "skipped": skipped, "scale": float(scale)}
        stepped = self._moves.machine.ledger(watch).stepped_at
        self._moves.tell([Breach("missing-update", watch, of, of.created, stepped, None, facts)], row.attempt)
