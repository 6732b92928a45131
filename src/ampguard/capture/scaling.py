"""Which scaler scales losses, and which loss a scaled one was made from."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor


class LossScaling:
    """What is known of it between two backward passes."""

    def __init__(self) -> None:
        self.scaler: Any = None
        """The scaler that scaled last."""
        self.is_unscaled = False
        """Whether it has divided gradients since."""
        self.losses: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        """By the identity of a scaled loss: that, and the loss it was made from."""

    def note(self, loss: Any, scaled: Any, scaler: Any) -> None:
        """Remember which loss a scaled loss was made from."""
        self.scaler, self.is_unscaled = scaler, False
        if isinstance(loss, Tensor) and isinstance(scaled, Tensor):
            self.losses[id(scaled)] = (weakref.ref(scaled), loss)

    def unscaled(self, tensor: Tensor) -> Tensor:
        """The loss that this one was made from, itself where it was not scaled."""
        known = self.losses.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else tensor
