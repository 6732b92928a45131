"""Flat buffers: tensors that an optimizer updates in place of the parameters that lie in their memory."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ampguard.compat import storage_key


def members_for_buffers(updated: Iterable[Tensor], parameters: Iterable[Tensor]) -> list[Tensor]:
    """What an optimizer updates, with a flat buffer replaced by those `parameters` whose gradients make up its own.

    No backward pass reaches the buffer itself.
    """
    known: set[int] = set()
    inside: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        known.add(id(parameter))
        if parameter.is_leaf and parameter.grad is not None:  # (asking another for it warns)
            inside.setdefault(storage_key(parameter.grad), []).append(parameter)
    inside.pop(0, None)  # no memory
    found: list[Tensor] = []
    for tensor in updated:
        members = inside.get(storage_key(tensor.grad)) if id(tensor) not in known and tensor.grad is not None else None
        found += members or [tensor]
    return found
