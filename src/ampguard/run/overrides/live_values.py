"""Healed values for the tensors that the script holds: what it reads, prints and decides by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.events.log import EventLog
from ampguard.capture.record import BackwardCall, Ref
from ampguard.numerics import is_finite


def live_results(log: EventLog) -> Iterator[tuple[Ref, Tensor]]:
    """What this iteration has made, as far as the script still holds it unchanged."""
    for event in log.slice().events:
        if isinstance(event, BackwardCall) or event.index < log.iteration_start or event.error is not None:
            continue
        for position, live in enumerate(event.outputs):
            tensor, ref = live(), Ref(event.index, position)
            if tensor is not None and log.lookup(tensor) == ref:
                yield ref, tensor


def may_be_healed(tensor: Tensor) -> bool:
    """Whether a result may be given another value: it is bad, or (a truth, a count) may tell of one that is."""
    return compat.has_values(tensor) and (not tensor.is_floating_point() or not is_finite(tensor))


def take_values(log: EventLog, made: Mapping[Ref, Tensor]) -> None:
    """Let the script's tensors that were bad, and truths about them, be what they would have been with the fix."""
    for ref, tensor in list(live_results(log)):
        healed = made.get(ref)
        if healed is None or healed.shape != tensor.shape or not is_finite(healed):
            continue
        is_truth = not tensor.is_floating_point() and not torch.equal(tensor, healed.to(tensor.dtype))
        if is_truth or not is_finite(tensor):
            write(tensor, healed.detach())


def write(tensor: Tensor, values: Tensor) -> None:
    """Other values for a live tensor, in its own memory where they fit its type.

    Its version stays: graphs that have kept it are those of the bad step, which nobody differentiates any more.
    """
    keeping = compat.keeping_version(tensor)
    if keeping is None:
        return
    with contextlib.suppress(RuntimeError), keeping, torch.no_grad():  # an expanded one cannot be written to
        tensor.copy_(values)
        if not is_finite(tensor):
            tensor.data = values
