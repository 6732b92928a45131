"""Custom `torch.autograd.Function`s applied outside every module.

Taped operator by operator they would lose their own backward; so each is recorded as one call, in a module of ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from ampguard.capture.log import EventLog
from ampguard.capture.record import GlueOp, RootCall
from ampguard.capture.trees import tensors_in


class Applied(nn.Module):
    """A custom function as a module, so that its calls are recorded and run again like any other."""

    def __init__(self, function: type) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)  # type: ignore[attr-defined]


class AppliedFunctions:
    """One module for each function in use."""

    def __init__(self) -> None:
        self._known: dict[type, Applied] = {}

    def module_of(self, function: type) -> Applied:
        known = self._known.get(function)
        if known is None:
            known = self._known[function] = Applied(function)
        return known


def checkpointed(
    log: EventLog, guarded: Callable[..., Any], apply: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Reentrant checkpointing around modules: they run without gradients here, and with them again in backward."""
    first = log.next_index
    output = apply(*args, **kwargs)
    guarded(_give_gradients, log, first, output)
    return output


def _give_gradients(log: EventLog, first: int, output: Any) -> None:
    """Let the events from `first` on be replayed as backward will run them, where it will."""
    if not any(tensor.requires_grad for tensor in tensors_in(output)):
        return
    for event in reversed(log.record.events):
        if event.index < first:
            return
        if isinstance(event, RootCall):
            event.modes = dataclasses.replace(event.modes, grad=True)
        elif isinstance(event, GlueOp):
            event.grad = True
