"""Steps that the script gives up before the scaler sees their gradients: nothing lowers the scale then.

`if not all finite: zero_grad(); continue` throws away one iteration after another at a scale that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ampguard.capture.protocol.moves import Moves
from ampguard.capture.record import Line
from ampguard.capture.recorder import FlightRecorder
from ampguard.protocol.events import Breach

FEWEST = 3
"""Such steps that are told."""
RARE = 0.1
"""Of the iterations: what is given up more seldom costs little."""


class PassedOver:
    """Counts them while the scale stays where it is, or rises."""

    def __init__(self, recorder: FlightRecorder, moves: Moves) -> None:
        self._recorder = recorder
        self._moves = moves
        self._scale = 0.0
        """That of the first of them; a lower one since begins anew."""
        self._count = 0
        self._since = 0

    def begin(self) -> None:
        """The first step of the run is attempted: what came before may have been a warm-up (of a CUDA graph)."""
        if self._count:
            self._moves.listener.on_suspicion(("passed over",), None, 0)
        self._count = 0

    def note(self, scaler: Any, scale: float, bad: Iterable[int], cleared_at: Line, has_stepped: bool) -> None:
        """One more, at this scale, with the bad gradients of these parameters (by identity)."""
        step = self._recorder.steps.count
        if not self._count or scale < self._scale:
            self._scale, self._count, self._since = scale, 0, step
        self._count += 1
        is_rare = self._count < RARE * (step - self._since)
        if scale <= 1.0 or self._count < FEWEST or is_rare:
            return
        bad = set(bad)
        watch = next((w for w in self._moves.mine() if any(id(p) in bad for p in w.parameters())), None)
        last = self._moves.machine.last_backward
        if watch is None or last is None or last.scale is None:
            return
        facts = {"passed_over": self._count, "scale": scale}
        of = self._moves.watches.scaler(scaler)
        breach = Breach("missing-update", watch, of, last.where, cleared_at, None, facts)
        if has_stepped:
            self._moves.tell([breach], self._since)
        else:
            self._moves.listener.on_suspicion(("passed over",), breach, self._since)
