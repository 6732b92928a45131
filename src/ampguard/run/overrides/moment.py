"""What a call of a module changes besides its result, kept so that the call can be made again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat


@dataclass(frozen=True, slots=True)
class Moment:
    """Random states and a module's buffers, as they were before a call."""

    torch_cpu: Tensor
    torch_cuda: list[Tensor]
    python: Any
    buffers: list[tuple[Tensor, Tensor]]

    @classmethod
    def before(cls, module: nn.Module) -> Moment:
        """Copies the module's buffers and the random states: some microseconds."""
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if compat.cuda_is_in_use() else [],
            random.getstate(),
            [(buffer, buffer.clone()) for buffer in compat.all_buffers(module)],
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Put it back."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(self.torch_cuda)
        random.setstate(self.python)
        for buffer, value in self.buffers:
            buffer.copy_(value)
