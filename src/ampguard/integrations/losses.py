"""How many losses were not finite, counted where they are and read when somebody asks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Losses:
    """Adds one operator a loss on its device; nothing waits before `bad` is read."""

    def __init__(self) -> None:
        self.seen = 0
        self._bad: Tensor | None = None

    @torch.no_grad()
    def saw(self, loss: Any) -> None:
        """A loss of a training step, of any shape."""
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            return
        self.seen += 1
        is_bad = (~torch.isfinite(loss.detach())).any()
        self._bad = is_bad.long() if self._bad is None else self._bad + is_bad.to(self._bad.device)

    @property
    def bad(self) -> int:
        """Losses that held NaN or Inf. Waits for the device."""
        return 0 if self._bad is None else int(self._bad)

    @property
    def is_free(self) -> bool:
        """Whether reading `bad` waits for nothing."""
        return self._bad is None or self._bad.is_cpu


def loss_of(output: Any) -> Any:
    """The loss among a transformers model's outputs; None where it returns none."""
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else None
    loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output:
        loss = loss_of(output[0])
    return loss
