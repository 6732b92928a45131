"""Parameters that the script has frozen between their backward pass and the replay: the phases of a GAN."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor


@contextlib.contextmanager
def thawed(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let those whose gradients are in question want them, as they did in the step."""
    frozen = [p for p in parameters if p.is_leaf and not p.requires_grad and p.is_floating_point()]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
