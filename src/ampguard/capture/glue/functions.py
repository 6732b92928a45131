"""Custom `torch.autograd.Function`s applied outside every module.

Taped operator by operator they would lose their own backward; so each is recorded as one call, in a module of ours.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from ampguard import compat
from ampguard.capture.events.log import EventLog
from ampguard.capture.frames import user_line
from ampguard.capture.record import GlueOp, Ref, RootCall, torch_rng_states
from ampguard.capture.root_calls.surroundings import current_modes
from ampguard.capture.root_calls.trees import map_tensors, tensors_in
from ampguard.capture.steps import StepCounter
from ampguard.capture.turns import Turns


class Applied(nn.Module):
    """A custom function as a module, so that its calls are recorded and run again like any other."""

    def __init__(self, function: type) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)  # type: ignore[attr-defined]


class AppliedFunctions:
    """Keeps their calls: one module for each function in use."""

    def __init__(self, log: EventLog, steps: StepCounter, turns: Turns) -> None:
        self._log = log
        self._steps = steps
        self._turns = turns
        self._known: dict[type, Applied] = {}

    def enter(self, function: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RootCall | None:
        """Keep what a call needs to be run again. None where it is not to be recorded."""
        if self._turns.thread != threading.get_ident() or compat.in_backward() or compat.in_functorch():
            return None
        log = self._log
        root = RootCall(
            index=log.claim_index(),
            module=self._module_of(function),
            args=map_tensors(args, log.named_argument),
            kwargs=map_tensors(kwargs, log.named_argument) if kwargs else {},
            modes=current_modes(),
            rng=torch_rng_states(),
            training=True,
            buffers=[],
            line=user_line(sys._getframe(2)),
            prefix="",
            updates_before=self._steps.attempts,
            is_function=True,
        )
        log.append(root)
        return root

    def leave(self, root: RootCall, output: Any) -> None:
        """Note what the function returned."""
        for position, tensor in enumerate(tensors_in(output)):
            root.outputs.append(self._log.define(tensor, Ref(root.index, position)))
            root.floating.append(tensor.is_floating_point())

    def _module_of(self, function: type) -> Applied:
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
