"""Weights of low precision that the script updates by itself, sampled: as they were before an update, and what it did.

A step of such a loop ends with its backward pass, so that the update is what comes between two of them. What runs there
outside modules is recorded, and kept with copies of a few weights and gradients until the next look.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.events.arguments import MAX_COPY
from ampguard.capture.events.operands import held_in
from ampguard.capture.record import BackwardCall, Event, GlueOp, Held, Ref
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.sampling.weights import WeightSampling
from ampguard.numerics import is_low_precision

MAX_WEIGHTS = 6
MAX_KEPT = 4 * MAX_WEIGHTS


class HandMade(torch.optim.Optimizer):
    """Stands for the script's own update where an optimizer is asked for. It is never stepped, and no probe knows it."""

    def __init__(self) -> None:
        self.param_groups = [{"params": []}]
        self.state = {}  # type: ignore[assignment]


@dataclass(slots=True)
class HandUpdate:
    """One update: the weights' values before it, the gradients, and the operators that ran until the next backward pass."""

    weights: list[tuple[Tensor, Tensor, Tensor]]
    """Each weight, its value before the update, its gradient."""
    call: BackwardCall
    inputs: list[Tensor | None]
    """What `torch.autograd.grad` was asked for."""
    events: list[GlueOp] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)
    """The weights' values after the update."""
    before: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)
    """The weights, and what the last update wrote to beside them (momentum): values before this one, and where they lay."""
    names: dict[Ref, Tensor] = field(default_factory=dict)
    """What operators before this update have made or written to, as far as it is among these."""

    def value_before(self, operand: Ref | Held) -> tuple[Tensor, Tensor] | None:
        """A tensor that was there before the update (an operand may be an alias of it), and its value then.

        None where it was not kept.
        """
        tensor = operand.tensor if isinstance(operand, Held) else self.names.get(operand)
        if tensor is None:
            return None
        memory = compat.storage_key(tensor)
        for known, value, place in self.before:
            if known is tensor or (place == memory != 0 and (value.shape, value.dtype) == (tensor.shape, tensor.dtype)):
                return known, value
        return None

    def values_of(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """What the weight was before, what it was after, and its gradient. None where it is not one of them."""
        for (known, before, gradient), after in zip(self.weights, self.after, strict=True):
            if known is weight:
                return before, after, gradient
        return None

    def gradient_of(self, ref: Ref) -> Tensor | None:
        """What `torch.autograd.grad` returned under this name."""
        if ref.event != self.call.index or ref.output >= len(self.inputs):
            return None
        return next((g for weight, _, g in self.weights if weight is self.inputs[ref.output]), None)


class HandUpdates:
    """Takes the looks, one iteration each."""

    def __init__(self, recorder: FlightRecorder, sampling: WeightSampling) -> None:
        self.last: HandUpdate | None = None
        self.optimizer = HandMade()
        self._recorder = recorder
        self._sampling = sampling
        self.begun: HandUpdate | None = None
        """The one that is looked at, which comes, or has come, after the last backward pass."""

    def begin(self, step: int) -> None:
        """A backward pass has ended, and the script may update its weights now."""
        events = self._recorder.log.kept_since(0)
        call = events[-1] if events else None
        if not isinstance(call, BackwardCall):
            return
        inputs = [self._tensor_of(wanted) for wanted in call.args[2] or ()]
        pairs = [(p, g) for p, g in self._gradients(call, inputs) if _is_followed(p, g)][:MAX_WEIGHTS]
        if not pairs:
            return
        earlier = _written_in(self._recorder.log.slice().events, {tuple(p.shape) for p, _ in pairs})
        with torch.no_grad(), compat.unseen():
            self.begun = HandUpdate([(p, p.detach().clone(), g.detach().clone()) for p, g in pairs], call, inputs)
            self.begun.before = [(p, value, compat.storage_key(p)) for p, value, _ in self.begun.weights]
            beside = {id(t): t for t in earlier.values() if all(t is not p for p, *_ in self.begun.before)}
            for tensor in list(beside.values())[:MAX_KEPT]:
                self.begun.before.append((tensor, tensor.detach().clone(), compat.storage_key(tensor)))
        self.begun.names = earlier
        self.optimizer.param_groups[0]["params"] = [p for p, _ in pairs]
        self._sampling.before_update(self.optimizer, step, None, None, pairs)

    def end(self) -> None:
        """The next backward pass has ended: the weights are as the update has left them."""
        update, self.begun = self.begun, None
        if update is None:
            return
        update.events = _since(self._recorder.log.slice().events, update.call.index)
        with torch.no_grad(), compat.unseen():
            update.after = [p.detach().clone() for p, *_ in update.weights]
        self.last = update if update.events else None
        self._sampling.after_update(self.optimizer)

    def _gradients(self, call: BackwardCall, inputs: list[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        if call.args[2] is None:
            return [(p, p.grad) for p in self._recorder.judge.gradients.parameters_of_modules() if p.grad is not None]
        made = [ref() for ref in call.outputs]
        return [(p, g) for p, g in zip(inputs, made, strict=False) if p is not None and g is not None]

    def _tensor_of(self, wanted: object) -> Tensor | None:
        """What the record knows as held, or as made by an event (the last update)."""
        if isinstance(wanted, Held):
            return wanted.tensor
        if not isinstance(wanted, Ref):
            return None
        event = self._recorder.log.record.event(wanted.event)
        return event.outputs[wanted.output]() if event is not None and wanted.output < len(event.outputs) else None


def _written_in(events: list[Event], shapes: set[tuple[int, ...]]) -> dict[Ref, Tensor]:
    """Tensors of these shapes that operators wrote to in place, or were given to be written to, and that are still there."""
    found: dict[Ref, Tensor] = {}
    for event in events:
        positions = compat.positions_written(event.func) if isinstance(event, GlueOp) else ()
        for held in held_in([event.args[i] for i in positions if i < len(event.args)]):
            found[Ref(event.index, -1 - len(found))] = held.tensor  # under a name that nothing has
        for position, ref in enumerate(event.outputs) if positions else ():
            tensor = ref()
            if tensor is not None:
                found[Ref(event.index, position)] = tensor
    return {name: t for name, t in found.items() if t.is_floating_point() and tuple(t.shape) in shapes}


def _is_followed(parameter: Tensor, gradient: Tensor) -> bool:
    is_dense = parameter.layout == gradient.layout == torch.strided and parameter.stride() == gradient.stride()
    return is_dense and is_low_precision(parameter.dtype) and parameter.numel() <= MAX_COPY


def _since(events: list[Event], index: int) -> list[GlueOp]:
    """The operators that ran outside modules after an event and before anything else was called."""
    found: list[GlueOp] = []
    for event in events:
        if event.index <= index:
            continue
        if not isinstance(event, GlueOp):
            break
        found.append(event)
    return found
