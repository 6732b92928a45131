"""Optimizers over flat buffers (FastReID's ContiguousParams): gradients stay in the buffers, whoever has cleared them.

`optimizer.zero_grad()` sets the buffer's gradient to None since PyTorch 2.0. Backward then fills the parameters' own
gradients, which the optimizer does not see: "No inf checks were recorded", or, without a scaler, weights that never move.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine.setup import parameters_of


class FlatGradients:
    """The flat buffers among an optimizer's parameters, and the model's parameters that lie in them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        own = {id(p) for p in compat.all_parameters(model)}
        self._flats = [
            flat
            for buffer in parameters_of(optimizer)
            if id(buffer) not in own and (flat := _Flat(buffer, model)).inside
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """After somebody's `zero_grad`: every gradient lies in its buffer again, and what was set to None is 0."""
        for flat in self._flats:
            flat.restore()


class _Flat:
    """One buffer and the tensor that its gradients have always been in."""

    def __init__(self, buffer: Tensor, model: nn.Module) -> None:
        key = compat.storage_key(buffer)
        self.buffer = buffer
        self.inside = [p for p in compat.all_parameters(model) if key and compat.storage_key(p) == key]
        self.gradient = _around(buffer, self.inside) if buffer.grad is None else buffer.grad

    def restore(self) -> None:
        if self.buffer.grad is None:
            self.buffer.grad = self.gradient.zero_()
        self.gradient = self.buffer.grad
        for p in self.inside:
            part = _part(self.gradient, p, self.buffer)
            if p.grad is None:
                p.grad = part.zero_()
            elif p.grad.data_ptr() != part.data_ptr():
                p.grad = part.copy_(p.grad)


def _around(buffer: Tensor, inside: Sequence[Tensor]) -> Tensor:
    """The tensor in which the parameters' gradients still lie as the parameters do in their buffer; else a new one."""
    begins = {_begin(buffer, p, p.grad) for p in inside if p.grad is not None}
    keys = {compat.storage_key(p.grad) for p in inside if p.grad is not None}
    begin = begins.pop() if len(begins) == len(keys) == 1 else None
    if begin is None:
        return torch.zeros_like(buffer)
    grad = next(p.grad for p in inside if p.grad is not None)
    return grad.as_strided((buffer.numel(),), (1,), begin)


def _begin(buffer: Tensor, parameter: Tensor, grad: Tensor) -> int | None:
    """Where in the gradient's memory the buffer's gradient would begin; None where it does not fit there."""
    if grad.layout != torch.strided or grad.dtype != buffer.dtype:
        return None
    begin = int(grad.storage_offset()) - int(parameter.storage_offset() - buffer.storage_offset())
    elements = grad.untyped_storage().nbytes() // grad.element_size()
    return begin if 0 <= begin <= elements - buffer.numel() else None


def _part(gradient: Tensor, parameter: Tensor, buffer: Tensor) -> Tensor:
    begin = gradient.storage_offset() + parameter.storage_offset() - buffer.storage_offset()
    return gradient.as_strided(parameter.shape, parameter.stride(), begin)
