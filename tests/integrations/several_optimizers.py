"""Ways to make a step of several optimizers, with whatever prepared them (an Accelerator, a Fabric)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Step = Callable[[Any, list[Any], list[Any], list[Tensor], int], None]


def one_backward(prepared: Any, parts: list[Any], optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    prepared.backward(torch.stack(losses).sum())
    for optimizer in optimizers:
        optimizer.step()
