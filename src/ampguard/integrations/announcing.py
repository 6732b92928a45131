"""Agreeing with whoever has wrapped GradScaler: whether losses are scaled, and that a scale came from a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from ampguard import compat
from ampguard.engine.announce import Announcer


class ResumedAnnouncer(Announcer):
    """As the engine's; with `was_loaded`, its scaler is seen to take over a saved state before anything else."""

    def __init__(self, value: Tensor | None, was_loaded: bool = False) -> None:
        super().__init__(value)
        self.was_loaded = was_loaded

    def _heard_by(self) -> compat.BorrowedScaler | None:
        if self.was_loaded and self._scaler is None and self._value is not None and _somebody_listens():
            self._scaler = compat.BorrowedScaler(self._value.device.type)
            self._scaler.load_state_dict(self._scaler.state_dict())  # before it scales for the first time
            self._scaler.scale(self._value.new_ones(()))
            self._scaler.update(self._value)
        return super()._heard_by()


def scalers_may_scale() -> bool:
    """Whether a GradScaler made now would be on: `ampguard run --precision bf16` makes them all be off."""
    return not compat.scaler_is_watched() or torch.amp.GradScaler("cpu").is_enabled()


def _somebody_listens() -> bool:
    return compat.scaler_is_watched() and compat.can_borrow_scaler()
