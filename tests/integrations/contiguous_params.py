"""Flat buffers as FastReID lays them out: one buffer of values and one of gradients for each kind of parameter."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ContiguousParams:
    """The model's parameters and their gradients become views of buffers, which the optimizer updates."""

    def __init__(self, model: nn.Module) -> None:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        self.groups = [decayed, [p for p in model.parameters() if p.dim() <= 1]]
        self.buffers = [self._flatten(group) for group in self.groups]
        self.pointers = [p.grad.data_ptr() for group in self.groups for p in group]

    def _flatten(self, parameters: list[nn.Parameter]) -> Tensor:
        buffer = torch.cat([p.detach().reshape(-1) for p in parameters])
        buffer.grad = torch.zeros_like(buffer)
        begin = 0
        for p in parameters:
            end = begin + p.numel()
            p.data = buffer[begin:end].view(p.shape)
            p.grad = buffer.grad[begin:end].view(p.shape)
            begin = end
        return buffer

    def contiguous(self) -> list[dict[str, object]]:
        return [{"params": buffer} for buffer in self.buffers]

    def assert_buffer_is_valid(self) -> None:
        now = [p.grad.data_ptr() for group in self.groups for p in group]
        if now != self.pointers:
            raise ValueError("The data or gradient buffer has been invalidated.")
