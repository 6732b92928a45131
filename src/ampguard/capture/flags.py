"""Is it finite? asked without waiting for a GPU.

On the CPU the answer is there at once. On another device a flag is computed behind the work that is queued already and
copied to pinned memory; it is read when the script itself has waited for the device, or at the latest just before an
optimizer changes the parameters. The flag of a loss lies ahead of its backward pass in the queue, so waiting for it
leaves the device busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.numerics import is_finite

MANY = 4
"""Tensors from which on they are looked at together."""
SMALL = 1 << 14
"""Elements up to which a tensor is put beside others for that, which takes less time than a call of its own."""


class FiniteFlag:
    """Whether some tensors are all finite, as far as it is known."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._host: Tensor | None = None
        floats = [t for t in tensors if (t.is_floating_point() or t.is_complex()) and compat.has_values(t)]
        if all(is_immediate(t) for t in floats):
            self._answer: bool | None = all(is_finite(t) for t in floats)
            return
        self._answer = None
        with torch.no_grad():
            values = [compat.elements_here(t.detach()) for t in floats]
            # a single number is looked at where it arrives
            found = values[0].reshape(()) if len(values) == 1 and values[0].numel() == 1 else _are_finite(values)
            self._host = torch.empty((), dtype=found.dtype, device="cpu", pin_memory=found.is_cuda)
            self._host.copy_(found, non_blocking=found.is_cuda)
        if found.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_known(self) -> bool:
        """Whether `is_set` would not wait."""
        return self._answer is not None or self._event is None or self._event.query()

    def is_set(self) -> bool:
        """Whether all were finite. Waits until the device has come to the flag."""
        if self._answer is None:
            if self._event is not None:
                self._event.synchronize()
            assert self._host is not None
            self._answer = bool(self._host) if self._host.dtype == torch.bool else is_finite(self._host)
        return self._answer


def _are_finite(tensors: list[Tensor]) -> Tensor:
    """On the device of the first, without waiting; by few kernels where the tensors are many."""
    if len(tensors) < MANY:
        found = [torch.isfinite(t).all() for t in tensors]
    else:
        groups: dict[Any, list[Tensor]] = {}
        for t in tensors:
            values = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
            if values.numel():
                groups.setdefault((values.device, values.dtype), []).append(values)
        found = []
        for group in groups.values():
            small = [t for t in group if t.numel() <= SMALL and type(t) is Tensor]
            if len(small) > 1:
                found.append(torch.isfinite(compat.flattened(small)).all())
                group = [t for t in group if t.numel() > SMALL or type(t) is not Tensor]
            if group:
                found.append(torch.isfinite(torch.stack(compat.largest_of(group))).all())
    if not found:  # all are empty
        return torch.ones((), dtype=torch.bool, device=tensors[0].device)
    return torch.stack([f.to(found[0].device, non_blocking=True) for f in found]).all()


def is_immediate(tensor: Tensor) -> bool:
    """Whether looking at the values costs no waiting."""
    return tensor.device.type == "cpu"
