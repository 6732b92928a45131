"""Which arguments of modules are copied: those that a script may write to before the step is explained."""

from __future__ import annotations

from torch import Tensor

from ampguard.capture.record import Held
from ampguard.compat import is_dense, plain_version

MAX_COPY = 1 << 22
"""Elements up to which a tensor is copied before an operator outside every module overwrites it."""

SMALL_ARGUMENT = 1 << 14
"""Elements up to which a module's argument is copied."""

TRUSTED_CALLS = 16
"""Calls of root modules after which arguments are no longer copied, if the script never wrote to one."""


class ArgumentCopies:
    """Copies small arguments of the first calls, and of all calls where the script was ever seen to write to one; larger ones
    where it was seen to write to one of these (a detector that normalises its batch in place)."""

    def __init__(self) -> None:
        self.copies_large = False
        """True once a larger input was seen to be changed in place: then those are copied as well."""
        self.waiting: list[Held] = []
        """What modules were given since the last look at it."""
        self._untouched_calls = 0
        """Looks in a row at which none of it had been written to."""

    def hold(self, tensor: Tensor, version: int) -> Held:
        """An argument that no event made. Small ones are copied: masks and states are changed in place before backward."""
        held = Held(tensor, version)
        if tensor.requires_grad or not is_dense(tensor):
            return held
        if self.copies_large or self._untouched_calls < TRUSTED_CALLS:
            limit = MAX_COPY if self.copies_large else SMALL_ARGUMENT
            if tensor.numel() <= limit:
                held.copy = tensor.clone()
        self.waiting.append(held)
        return held

    def look(self) -> None:
        """Were arguments of the calls that are forgotten written to since? If never, they need not be copied."""
        self._untouched_calls += 1
        for held in self.waiting:
            tensor = held.tensor
            if (-1 if tensor.is_inference() else plain_version(tensor)) != held.version:
                self._untouched_calls = -(1 << 60)
                self.copies_large |= tensor.numel() > SMALL_ARGUMENT
        self.waiting.clear()
