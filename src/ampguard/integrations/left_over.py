"""Whether an optimizer's gradients are still those that its last step has left."""

from __future__ import annotations

import weakref

from torch import Tensor

from ampguard import compat
from ampguard.integrations.updating import Updating

Mark = tuple[weakref.ref[Tensor], int]
"""One gradient and its version. A reference, because Python uses an identity again."""


def marks_of(own: Updating) -> list[Mark]:
    """Of all gradients there are. Reads no values."""
    gradients = [p.grad for p in own.holding.parameters if p.grad is not None]
    return list(zip(map(weakref.ref, gradients), compat.versions_of(gradients), strict=True))


def are_as_marked(own: Updating, marks: list[Mark]) -> bool:
    """Whether nobody has written to them, replaced or cleared one since."""
    gradients = [p.grad for p in own.holding.parameters if p.grad is not None]
    if not marks or len(gradients) != len(marks):
        return False
    versions = compat.versions_of(gradients)
    return all(ref() is g and v == now for (ref, v), g, now in zip(marks, gradients, versions, strict=True))
