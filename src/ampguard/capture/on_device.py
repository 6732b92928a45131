"""Gradients on an accelerator that no scaler looks at: are they finite? asked without holding the script up.

A flag is queued behind the backward pass. Where the device has come to the end of the last step by then (the script itself
waits for it in each step, by `loss.item()` for one, or is what takes the time), its answer is waited for before the optimizer
changes the parameters, and a bad step can be run again as any other. Elsewhere waiting would cost what the script gains by
running ahead by more than a step: the answer is read in the next step, which it lies ahead of in the queue. For that the
weights are copied before the update, where they are small beside what the script takes; if the gradients were bad, the step is
run again with the copies in the place of the weights that it has spoilt.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.events.log import EventLog
from ampguard.capture.flags import FiniteFlag, is_immediate
from ampguard.capture.glue.told import tell_calls
from ampguard.capture.record import BadResult, StepRecord
from ampguard.capture.sampling.memory import available_bytes, peak_bytes
from ampguard.compat import cuda_is_capturing as is_capturing
from ampguard.compat import cuda_is_in_use as is_in_use
from ampguard.numerics import is_finite

ROOM_SHARE = 1 / 32
"""Of the memory that is left, the copies of one optimizer's weights may take."""

PEAK_SHARE = 1 / 50
"""The same of the memory that the script has used."""


@dataclass(slots=True)
class _Copies:
    """Room for the weights of one optimizer."""

    parameters: list[weakref.ref[Tensor]]
    kinds: list[tuple[torch.Size, torch.dtype]]
    values: list[Tensor]

    def are_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the very parameters, and what they were."""
        if len(parameters) != len(self.values) or _kinds(parameters) != self.kinds:
            return False
        return all(known() is p for known, p in zip(self.parameters, parameters, strict=True))


class DeviceGradients:
    """Asked before each update that no scaler allows; tells of bad gradients whose update is over when that is known."""

    def __init__(self, log: EventLog, report: Callable[[BadResult], None]) -> None:
        self.waits_always = False
        """Whether a bad update is to be stopped or held off, whatever the waiting costs."""
        self.has_asked = False
        """Whether gradients of the running iteration lie on a device."""
        self._log = log
        self._report = report
        self._end: Any = None
        """An event behind the last iteration's updates."""
        self.waiting: tuple[FiniteFlag, BadResult, _Copies | None, weakref.ref[Optimizer]] | None = None
        """An update that was made and for which the device has not answered yet."""
        self._copies: weakref.WeakKeyDictionary[Optimizer, _Copies | None] = weakref.WeakKeyDictionary()
        """By optimizer; None where there is no room, and where its weights were told to be bad."""

    def are_finite(self, optimizer: Optimizer, step: int, since: int, may_tell_late: bool) -> bool:
        """Whether they are, as far as it is known before they are used. `may_tell_late`: no loss is to blame for bad ones."""
        with_gradient = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not with_gradient or is_immediate(with_gradient[0].grad) or is_capturing():
            return True
        self.has_asked = True
        parameters = list(filter(_is_watched, with_gradient))
        flag = FiniteFlag([p.grad for p in parameters])
        if self._may_wait():
            return flag.is_set()
        if may_tell_late and parameters:
            copies = self._copied(optimizer, parameters)
            record = self._log.snapshot() if copies is not None else StepRecord()
            held, is_late = tuple(parameters), copies is None
            bad = BadResult("gradient", "train", step, record, (), parameters=held, since=since, is_late=is_late)
            self.waiting = flag, bad, copies, weakref.ref(optimizer)
        return True

    def _may_wait(self) -> bool:
        """Whether waiting costs next to nothing: the script is not ahead of the device by more than this step."""
        return self.waits_always or self._end is None or bool(self._end.query())

    def iteration_ends(self) -> None:
        """The update that ends it is queued."""
        self.has_asked = False
        if not is_in_use() or is_capturing():
            return
        if self._end is None:
            self._end = torch.cuda.Event()
        self._end.record()

    def read(self) -> None:
        """Tell of the last update's gradients if they were bad. Waits for the device to have come to that update."""
        if self.waiting is None:
            return
        (flag, bad, copies, known), self.waiting = self.waiting, None
        if flag.is_set() or all(is_finite(p.detach()) for p in bad.parameters):
            return
        optimizer = known()
        if optimizer is not None:
            self._copies[optimizer] = None  # what is told of keeps these; the weights are bad from here on
        if copies is not None:
            tell_calls(bad.record)
            weights = tuple(zip(bad.parameters, copies.values, strict=True))
            bad = dataclasses.replace(bad, weights=weights)
        self._report(bad)

    def _copied(self, optimizer: Optimizer, parameters: list[Tensor]) -> _Copies | None:
        """The weights as they are; None where there is no room for them."""
        copies = self._copies.get(optimizer)
        if copies is None and optimizer in self._copies:
            return None
        if copies is None or not copies.are_of(parameters):
            copies = self._copies[optimizer] = _room_for(parameters)
        if copies is not None:
            with torch.no_grad():
                compat.copy_together(copies.values, [p.detach() for p in parameters])
        return copies


def _room_for(parameters: list[Tensor]) -> _Copies | None:
    size = sum(p.numel() * p.element_size() for p in parameters)
    left, used = available_bytes(parameters), peak_bytes(parameters)
    if (left is not None and size > ROOM_SHARE * left) or (used is not None and size > PEAK_SHARE * used):
        return None
    values = [torch.empty_like(p.detach()) for p in parameters]
    return _Copies([weakref.ref(p) for p in parameters], _kinds(parameters), values)


def _kinds(parameters: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(p.shape, p.dtype) for p in parameters]


def _is_watched(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return (
        gradient is not None
        and type(parameter) in (nn.Parameter, Tensor)
        and type(gradient) is Tensor
        and not is_immediate(gradient)
        and gradient.layout == torch.strided
        and gradient.is_floating_point()
        and parameter.numel() > 0
        and compat.has_values(gradient)
    )
