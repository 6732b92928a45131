"""Which scale does what is about to be differentiated carry? Asked of what scalers have returned, and of what went before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.carried import goes_on_in
from ampguard.capture.protocol.graph_units import TakenGradients
from ampguard.capture.protocol.loss_scale import DeviceScale, ScaledLosses, goes_on
from ampguard.capture.protocol.watches import ScalerWatch, Watches
from ampguard.protocol.machine import Machine


class CarriedScales:
    """Knows what was scaled, and by whom."""

    def __init__(self, machine: Machine, watches: Watches) -> None:
        self.losses = ScaledLosses()
        self.fresh: Tensor | None = None
        """What the scaler has scaled last, until it is differentiated: not yet among the scaled losses."""
        self.fresh_from: ScalerWatch | None = None
        self.taken = TakenGradients()
        self.by_gradients = False
        """What was asked about last carries a scale because it was made of gradients that do."""
        self.ended_outside: DeviceScale | None = None
        """Which scale a backward pass carried that has reached no optimizer: its gradients are for something else."""
        self.plain_outside = False
        """The last backward pass that has reached no optimizer carried none: the gradients that it has left are plain."""
        self._machine = machine
        self._watches = watches

    def scaled(self, of: ScalerWatch, result: Any) -> None:
        """`scaler.scale()` returned `result`."""
        self._remember_fresh()
        if type(result) is Tensor:
            self.fresh, self.fresh_from = result, of
            of.current_scale()
        else:
            self.losses.note(result, of.current_scale())

    def is_scaled(self, loss: Any) -> bool:
        """Whether it is a loss that a scaler has scaled."""
        return loss is self.fresh or self.losses.scale_of_one(loss) is not None

    def is_scaled_twice(self, loss: Any) -> bool:
        """Whether a loss that carries a scale was made of what carried it already: it was scaled by two parts of the script,
        or what goes on from the gradients of an earlier scaled loss was scaled again."""
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            return False
        last = self._machine.last_backward
        is_open = last is not None and isinstance(last.scale, DeviceScale) and last.scale.watch.scale is last.scale
        with compat.unseen():
            return self.losses.holds_two(loss, self.fresh) or (
                is_open and not self.plain_outside and goes_on_in(loss, False)
            )

    def _remember_fresh(self) -> None:
        """The last scaled loss is not the only one."""
        if self.fresh is not None and self.fresh_from is not None:
            self.losses.note(self.fresh, self.fresh_from.current_scale())
        self.fresh = None

    def scale_of(self, losses: Any, gradients: Any) -> tuple[DeviceScale | None, bool]:
        """The scale that losses (or the gradients given for them) carry, and whether a part carries none."""
        self.by_gradients = False
        if losses is self.fresh and self.fresh_from is not None:
            return self.fresh_from.current_scale(), False
        self._remember_fresh()
        known = self.losses.scale_of_one(losses)
        if known is not None:
            return known, False
        scales = [w.current_scale() for w in self._watches.scalers if w.is_enabled and w.uses]
        if not scales:
            return None, True
        tensors = [losses] if isinstance(losses, Tensor) else [t for t in losses if isinstance(t, Tensor)]
        given = gradients if isinstance(gradients, Sequence) else [gradients] * len(tensors)
        scale, is_plain = self.losses.scale_of(tensors, given, scales)
        if scale is None and self.taken.are_there and gradients is None:
            scale = self.taken.carried_by(losses)
            if scale is not None:
                self.by_gradients = True
                return scale, False
        if scale is None and (last := self._machine.last_backward) is not None:
            carried = last.scale
            is_open = isinstance(carried, DeviceScale) and carried.watch.scale is carried  # no update has come since
            if is_open and (
                any(map(goes_on, given))
                or (not self.plain_outside and goes_on_in(losses, carried is self.ended_outside))
            ):
                return carried, False  # type: ignore[return-value]
        return scale, is_plain
