"""Says to whoever watches PyTorch's GradScaler what the engine does with its own loss scale."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat


class Announcer:
    """Does nothing but the work itself while nobody listens.

    While the guard (or another tool) has wrapped GradScaler's methods, scaling, unscaling, step and update go through
    a GradScaler of our own, so that they are seen for what they are.
    """

    def __init__(self, value: Tensor | None, was_loaded: bool = False) -> None:
        self._value = value
        self.was_loaded = was_loaded
        """Whether the scale came out of a checkpoint: who listens then sees its scaler take over a saved state."""
        self._scaler: compat.BorrowedScaler | None = None

    def is_heard(self) -> bool:
        """Whether somebody watches now."""
        return self._heard_by() is not None

    def _heard_by(self) -> compat.BorrowedScaler | None:
        if self._value is None or not compat.scaler_is_watched() or not compat.can_borrow_scaler():
            self._scaler = None
            return None
        if self._scaler is None:
            self._scaler = compat.BorrowedScaler(self._value.device.type)
            if self._scaler.is_enabled():
                self._begin(self._scaler, self._value)
        return self._scaler if self._scaler.is_enabled() else None  # an override may switch every GradScaler off

    def _begin(self, scaler: compat.BorrowedScaler, value: Tensor) -> None:
        if self.was_loaded:
            scaler.load_state_dict(scaler.state_dict())  # before it scales for the first time
        scaler.scale(value.new_ones(()))  # makes its tensors
        scaler.update(value)

    def restored(self, was_loaded: bool) -> None:
        """The scale was set: from a checkpoint, or back to what it was some steps ago."""
        self.was_loaded = self.was_loaded or was_loaded
        self._scaler = None

    def scale(self, loss: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        """`loss` times the scale."""
        scaler = self._heard_by()
        return multiply(loss) if scaler is None else scaler.scale(loss)

    def unscaled(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        """The loop has had its gradients divided."""
        scaler = self._heard_by()
        if scaler is not None:
            scaler.unscale_as(optimizer, found_inf)

    def rescaled(self, optimizer: Optimizer) -> None:
        """Gradients that were divided carry the scale again: more will be added to them."""
        scaler = self._heard_by()
        if scaler is not None:
            scaler.rescale_as(optimizer)

    def step(self, optimizer: Optimizer, found_inf: Tensor, apply: Callable[[], None]) -> None:
        """An optimizer steps, or skips, in `apply`."""
        scaler = self._heard_by()
        if scaler is None:
            apply()
        else:
            scaler.step_by(optimizer, found_inf, apply)

    def updated(self) -> None:
        """The scale has its value for the next iteration."""
        scaler = self._heard_by()
        if scaler is not None and self._value is not None:
            scaler.update(self._value)
