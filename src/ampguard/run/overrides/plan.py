"""The precision that everything is to run in. It can change while the script runs: a fix may be applied to it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ampguard.engine.precision import mode_named
from ampguard.engine.precision.base import Precision


class Plan:
    """What autocast regions and scalers are to be. With `mode` None they are what the script makes them."""

    def __init__(self, name: str | None) -> None:
        self.mode: type[Precision] | None = mode_named(name) if name is not None else None
        self.lifts_own_weights = False
        """Whether models whose weights the script itself made low run on float32 casts of them."""
        self.is_healed = False
        """Whether they do so as a fix, which is taken back where a model does not bear it."""

    def change(self, name: str) -> Callable[[], None]:
        """From now on another precision. Returns what takes it back."""
        before = self.mode, self.lifts_own_weights
        self.mode = mode_named(name)

        def take_back() -> None:
            self.mode, self.lifts_own_weights = before

        return take_back

    @property
    def is_set(self) -> bool:
        return self.mode is not None

    @property
    def dtype(self) -> torch.dtype | None:
        """What autocast computes in; None: it is off."""
        return self.mode.autocast_dtype if self.mode is not None else None

    @property
    def weights_dtype(self) -> torch.dtype:
        """What the script's weights are in a call of its models."""
        return self.mode.weights_dtype if self.mode is not None else torch.float32

    @property
    def low_dtype(self) -> torch.dtype | None:
        """The same where they are low; else None."""
        return self.weights_dtype if self.weights_dtype != torch.float32 else None

    @property
    def keeps_masters(self) -> bool:
        """Whether the optimizer goes on updating float32 weights where calls run on lower ones."""
        return self.mode is not None and self.mode.keeps_masters

    @property
    def scales_loss(self) -> bool:
        """Whether float16 gradients need a loss scale."""
        return self.mode is not None and self.mode.scales_loss
