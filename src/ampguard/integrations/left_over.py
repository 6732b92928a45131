"""Whether an optimizer's gradients are still those that its last step has left."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from ampguard import compat
from ampguard.integrations.updating import Updating

Mark = tuple[weakref.ref[Tensor], int]
"""One gradient and its version. A reference, because Python uses an identity again."""


def marks_of(own: Updating) -> list[Mark]:
    """Of all gradients there are. Reads no values."""
    return _marks(own.holding.parameters)


def are_as_marked(own: Updating, marks: list[Mark]) -> bool:
    """Whether nobody has written to them, replaced or cleared one since."""
    return _are_as_marked(own.holding.parameters, marks)


def glanced_marks_of(own: Updating) -> list[Mark]:
    """Of a sample of its gradients: cheap enough for every micro-step."""
    return _marks(own.holding.sample())


def are_as_glanced(own: Updating, marks: list[Mark]) -> bool:
    """As `are_as_marked`, of the sample."""
    return _are_as_marked(own.holding.sample(), marks)


def _marks(parameters: Sequence[Tensor]) -> list[Mark]:
    gradients = [p.grad for p in parameters if p.grad is not None]
    return list(zip(map(weakref.ref, gradients), compat.versions_of(gradients), strict=True))


def _are_as_marked(parameters: Sequence[Tensor], marks: list[Mark]) -> bool:
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not marks or len(gradients) != len(marks):
        return False
    versions = compat.versions_of(gradients)
    return all(ref() is g and v == now for (ref, v), g, now in zip(marks, gradients, versions, strict=True))
