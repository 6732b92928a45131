"""Backward passes as events: what was differentiated, with which factors, by what, and what came of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ampguard.capture.events.log import EventLog
from ampguard.capture.record import BackwardCall, Held, Line, Ref
from ampguard.capture.root_calls.surroundings import current_modes
from ampguard.capture.steps import StepCounter
from ampguard.compat import version_of


class BackwardCalls:
    """Keeps them in the log."""

    def __init__(self, log: EventLog, steps: StepCounter) -> None:
        self._log = log
        self._steps = steps
        self.place: Line | None = None
        """From where the last pass was made; None of a derivative that a transform of `torch.func` takes."""
        self.is_again = False
        """Whether such a derivative is computed once more, by a pass that is seen."""

    def keep(
        self, tensors: tuple[Tensor, ...], gradients: Any, inputs: Any, create_graph: bool, line: Line | None
    ) -> BackwardCall:
        """Of a call that is about to be made."""
        log = self._log
        is_plain = gradients is None and inputs is None
        named = tensors if is_plain else tuple([log.lookup(t) or Held(t, version_of(t)) for t in tensors])
        if gradients is not None:
            gradients = log.named((gradients,) if isinstance(gradients, Tensor) else tuple(gradients))
        if inputs is not None:
            wanted = each_of(inputs)
            inputs = [Held(t, version_of(t)) if isinstance(t, nn.Parameter) else log.named(t) for t in wanted]
        index, made = log.next_index, self._steps.attempts
        log.next_index = index + 1
        call = BackwardCall(index, (named, gradients, inputs), line, create_graph, made, current_modes(), [], [])
        if is_plain:
            log.keep_backward(call)
        else:
            log.append_named(call)
        return call

    def returned(self, call: BackwardCall, gradients: Any) -> None:
        """What `torch.autograd.grad` returned."""
        for position, gradient in enumerate(each_of(gradients)):
            if isinstance(gradient, Tensor):
                self._log.producers.define(gradient, Ref(call.index, position))
                call.outputs.append(weakref.ref(gradient))
                call.floating.append(True)
            else:
                call.outputs.append(lambda: None)  # type: ignore[arg-type]  # a weak reference to nothing
                call.floating.append(False)


def each_of(inputs: Any) -> tuple[Any, ...]:
    """The inputs of a derivative as PyTorch takes them: one tensor (or edge of the graph), a dictionary's values, or any
    iterable (`parameters.values()`). An iterator is used up."""
    if isinstance(inputs, (Tensor, GradientEdge)) or not isinstance(inputs, Iterable):
        return (inputs,)
    return tuple(inputs.values()) if isinstance(inputs, dict) else tuple(inputs)
