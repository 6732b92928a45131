"""Calls past the wrapper: of a part of a DDP model, with gradients, in an iteration in which DDP itself was not called.

DDP gets ready to average gradients in its own forward pass. What is trained by `model.module(x)` alone is not averaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ampguard import compat
from ampguard.capture.record import Line, RootCall


@dataclass(frozen=True, slots=True)
class PastWrapper:
    """Such a call. `part`: the name of what was called inside DDP ("" for the whole model); None where a module that
    only shares parts with it was called."""

    part: str | None
    type_name: str
    line: Line | None


def past_wrapper(ddp: nn.parallel.DistributedDataParallel, calls: Iterable[RootCall]) -> PastWrapper | None:
    """The last call past `ddp` of an iteration; None where there is none, or where DDP was called with gradients too."""
    parts = {part: name for name, part in compat.named_modules(ddp.module) if has_trained(part)}
    found: PastWrapper | None = None
    for call in calls:
        if not call.modes.grad:
            continue
        called = set(compat.all_modules(call.module))
        if ddp in called:
            return None
        if not called.isdisjoint(parts):
            found = PastWrapper(parts.get(call.module), type(call.module).__name__, call.line)
    return found


def has_trained(module: nn.Module) -> bool:
    """Whether any of its parameters is trained."""
    return any(parameter.requires_grad for parameter in compat.all_parameters(module))
