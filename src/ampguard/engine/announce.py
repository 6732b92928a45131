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

    def __init__(self, value: Tensor | None) -> None:
        self._value = value
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
            self._scaler.scale(self._value.new_ones(()))  # makes its tensors
            self._scaler.update(self._value)
        return self._scaler

    def scale(self, loss: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        """`loss` times the scale."""
        scaler = self._heard_by()
        return multiply(loss) if scaler is None else scaler.scale(loss)

    def unscaled(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        """The loop has had its gradients divided."""
        scaler = self._heard_by()
        if scaler is not None:
            scaler.unscale_as(optimizer, found_inf)

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
