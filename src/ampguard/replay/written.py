"""What a step writes to and did not make: no replay may change it.

A batch that is a slice of the data and is normalised in place, a row of a queue: the operator writes to a view. What reads
the rest of the tensor, or the view itself, later in the step is to see what was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor

from ampguard import compat

MAX_COPIED = 1 << 24
"""Elements up to which each replay has a copy of its own of what is written to."""


class GivenWrittenError(Exception):
    """An operator is about to write to a view of what the record holds: the replay begins again, with a copy of `given`."""

    def __init__(self, given: Tensor) -> None:
        super().__init__("a given of the step is written to")
        self.given = given


def not_given(target: Any, given: Mapping[int, tuple[Tensor, Tensor]], kept: Set[int]) -> Any:
    """What is about to be written to; a copy of it where it shares the memory of what the record holds.

    That is a tensor of the script itself (a weight, by its `.data`), or a value that was kept of one for every replay. What
    else reads it is to see what is written: raises `GivenWrittenError` where that can be.
    """
    known = given.get(compat.storage_key(target)) if isinstance(target, Tensor) else None
    if known is None or not (known[0] is known[1] or id(known[0]) in kept):
        return target
    value, held = known
    if id(value) in kept and not held.requires_grad and value.numel() <= MAX_COPIED:
        raise GivenWrittenError(value)
    return target.clone()
