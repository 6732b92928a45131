"""A stretch of steps that can be run again: the weights once, then what each step was made of.

What a step read is held by reference, as in its record; small tensors, which may be written to in place, are copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.events.operands import held_by, held_in, refs_of
from ampguard.capture.raised import is_refused
from ampguard.capture.record import BackwardCall, Event, Ref, RootCall, StepRecord
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.sampling.copies import Snapshot, distance
from ampguard.numerics import is_finite

SHOWN_RISE = 4.0
"""Where the loss has risen so much from the first kept step to the last, the beginning is kept and the rest is not."""
SMALL_TENSOR = 1 << 14
"""Elements up to which a tensor that a step read is copied (a loss scale that is written to in place, a mask)."""


@dataclass(slots=True)
class Update:
    """One optimizer's step: before which event it came, and what it was made of.

    `options` are those of each parameter group at that time. `scale`: the loss scale that the gradients had been divided
    by (a scaler's, or one of the script's own), None without any. `grad_norm`: of the gradients that were used.
    """

    before: int
    optimizer: int
    options: list[dict[str, Any]]
    scale: float | None
    grad_norm: float | None


@dataclass(slots=True)
class KeptStep:
    """One iteration: its events, its updates, and its losses as they were. `target` is the bad loss or result of a failed one."""

    number: int
    record: StepRecord
    updates: list[Update]
    losses: list[float | Tensor]
    scale: float | None = None
    target: Ref | None = None
    target_scale: float | None = None
    """By which loss scale the target was multiplied."""
    raises: bool = False
    """Whether the target is what a model would have returned that raised an error instead."""

    @property
    def loss(self) -> float | None:
        """The sum of the losses that were differentiated."""
        return float(sum(float(loss) for loss in self.losses)) if self.losses else None

    def loss_of(self, optimizer: int) -> float | None:
        """The sum of those that one of several optimizers answered; of those that none did, where it made no update."""
        calls = [e.index for e in self.record.events if isinstance(e, BackwardCall) and not e.create_graph]
        if len(calls) > len(self.losses):
            return None
        steps = any(update.optimizer == optimizer for update in self.updates)
        found: list[float] = []
        for index, loss in zip(calls, self.losses, strict=False):
            answer = next((update.optimizer for update in self.updates if update.before > index), None)
            if answer == optimizer or (answer is None and not steps):
                found.append(float(loss))
        return sum(found) if found else None


@dataclass(slots=True)
class Segment:
    """The weights, and the steps from there on. `bytes_held`: of the inputs that only these steps hold on to."""

    snapshot: Snapshot
    steps: list[KeptStep] = field(default_factory=list)
    bytes_held: int = 0
    last_inputs: dict[int, int] = field(default_factory=dict)
    """Bytes of what the last step read, by storage: what the next one reads as well is the script's own (a data set)."""

    @property
    def size(self) -> int:
        return self.snapshot.size + self.bytes_held

    def keep(self, step: KeptStep) -> None:
        """Take in one more step."""
        self.steps.append(step)
        inputs = input_bytes(step.record.events, self.snapshot)
        self.bytes_held += sum(size for key, size in self.last_inputs.items() if key not in inputs)
        self.last_inputs = inputs


@dataclass(slots=True)
class Stretch:
    """What is kept. `highest`: the largest |loss| before the alarm; `rate`: the largest learning rate before it."""

    reason: str
    raised_at: int
    highest: float
    rate: float
    first_update: float | None = None
    """About how large its first update was against the weights, where it began with one of the run's first updates: nothing
    is known of what is usual."""
    segments: deque[Segment] = field(default_factory=deque)
    refusal: str | None = None
    """Why nothing (more) is kept."""
    failing: KeptStep | None = None
    """The step that has failed; the last of the steps, unless these are closed."""
    is_closed: bool = False
    """The steps show how the loss rises: later ones, and the one that fails, are not kept."""

    @property
    def steps(self) -> list[KeptStep]:
        return [step for segment in self.segments for step in segment.steps]

    @property
    def snapshot(self) -> Snapshot:
        return self.segments[0].snapshot

    @property
    def size(self) -> int:
        """Bytes that are held."""
        return sum(segment.size for segment in self.segments)

    def moved(self) -> float | None:
        """||weights now - weights then|| / ||weights then||; None where the weights are not finite any more."""
        return distance(self.snapshot.pairs())


def has_risen(steps: list[KeptStep]) -> bool:
    """Whether the last of these steps had a loss far above the first one's."""
    first, last = steps[0].loss, steps[-1].loss
    return first is not None and last is not None and abs(last) >= SHOWN_RISE * abs(first) > 0


def find_target(step: KeptStep, recorder: FlightRecorder) -> None:
    """The loss of a step that failed before it was differentiated: the last single number that is not finite.

    Where the script raised over a result before it made a loss of it: the last result that is not finite; where the model
    raised: what it would have returned.
    """
    for event in reversed(step.record.events):
        if isinstance(event, BackwardCall) and not event.create_graph:
            return
        for position, ref in enumerate(event.outputs):
            tensor = ref()
            if tensor is None or not tensor.is_floating_point() or is_finite(tensor):
                continue
            if tensor.numel() == 1:
                step.target = Ref(event.index, position)
                is_scaled = id(tensor) in recorder.scaling.losses
                step.target_scale = step.scale if is_scaled else recorder.judge.last_scale
                return
            if step.target is None and is_refused(tensor):
                step.target = Ref(event.index, position)
    last = step.record.events[-1] if step.record.events else None
    if step.target is None and isinstance(last, RootCall) and not last.outputs:
        step.target, step.raises = Ref(last.index, 0), True


def needed_events(record: StepRecord) -> list[Event]:
    """The events that its backward passes and what they differentiate come from."""
    by_index = {event.index: event for event in record.events}
    wanted = {e.index for e in record.events if isinstance(e, BackwardCall) and not e.create_graph}
    pending = list(wanted)
    while pending:
        event = by_index.get(pending.pop())
        if event is None:
            continue
        found = {ref.event for ref in refs_of(event)} | set(record.writers.get(event.index, ()))
        pending += found - wanted
        wanted |= found
    return [event for event in record.events if event.index in wanted]


def why_not(record: StepRecord, snapshot: Snapshot) -> str | None:
    """Why this step cannot be run again later; None where it can, as far as is known now."""
    if not record.events:
        return "the backward pass of a step was not recorded"
    if not record.complete:
        return "some operators of a step ran unrecorded"
    for event in record.events:
        if not isinstance(event, Event):
            return "a step was not recorded operator by operator"
        if isinstance(event, RootCall) and event.swapped_state:
            return "a module ran on other weights than its own"
        for held in held_by(event):
            if held.tensor.grad_fn is not None and not snapshot.has(held.tensor):
                return "a step used a tensor that was computed inside a module or in an earlier step"
    return None


def secure(events: Sequence[Event]) -> None:
    """Copy the small tensors that a step read and that may be written to in place before it is run again."""
    for event in events:
        for held in held_by(event):
            tensor = held.tensor
            if held.copy is not None or tensor.requires_grad or tensor.numel() > SMALL_TENSOR:
                continue
            is_weight = type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)  # (a plain one takes long)
            if not is_weight and compat.is_dense(tensor) and held.is_intact:
                held.copy = held.value.detach().clone()


def input_bytes(events: Sequence[Event], snapshot: Snapshot) -> dict[int, int]:
    """Bytes of the memory that the events hold on to, by storage; the trained parameters left out."""
    tensors = [held.value for e in events for held in held_in((e.args, e.kwargs)) if not snapshot.has(held.tensor)]
    roots = [event for event in events if isinstance(event, RootCall)]
    tensors += [saved.copy for root in roots for saved in root.buffers if saved.copy is not None]
    return {compat.storage_key(t): t.untyped_storage().nbytes() for t in tensors if t.layout == torch.strided}
