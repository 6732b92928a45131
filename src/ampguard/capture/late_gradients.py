"""Gradients on a device that no scaler looks at: whether they were finite is read a step later, so that nobody waits.

Before an optimizer uses them their norm is computed behind the work that is queued already, and its weights are copied, if
there is room. When the next step's loss has come, the answer lies ahead of it in the queue. If the gradients were bad, the
step is run again with the copies in the place of the weights that it has spoilt.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.events.log import EventLog
from ampguard.capture.flags import FiniteFlag, is_capturing, is_immediate
from ampguard.capture.glue.told import tell_calls
from ampguard.capture.record import BadResult
from ampguard.capture.sampling.memory import available_bytes
from ampguard.capture.sampling.weights import norm_of
from ampguard.numerics import is_finite

MEMORY_SHARE = 1 / 32
"""Of what is left, the copies of one optimizer's weights may take."""


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


class LateGradients:
    """Asks whether gradients on a device are finite, and tells of bad ones when that is known."""

    def __init__(self, log: EventLog, report: Callable[[BadResult], None]) -> None:
        self._log = log
        self._report = report
        self._waiting: tuple[FiniteFlag, BadResult, _Copies, weakref.ref[torch.optim.Optimizer]] | None = None
        self._copies: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Copies | None] = weakref.WeakKeyDictionary()
        """By optimizer; None where there is no room, and where its weights were told to be bad."""

    @property
    def is_waiting(self) -> bool:
        return self._waiting is not None

    def about_to_be_used(self, optimizer: torch.optim.Optimizer, step: int, since: int) -> None:
        """An optimizer is about to use gradients at which nobody has looked. Waits for nothing."""
        with_gradient = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not with_gradient or is_immediate(with_gradient[0].grad) or is_capturing():
            return
        copies = self._copies.get(optimizer)
        if copies is None and optimizer in self._copies:
            return
        parameters = with_gradient
        if copies is None or not copies.are_of(with_gradient):
            parameters = list(filter(_is_watched, with_gradient))
            if copies is None or not copies.are_of(parameters):
                copies = self._copies[optimizer] = self._room_for(parameters)
        norm = norm_of([p.grad for p in parameters])
        if norm is None or copies is None:
            return  # there is none, they are on several devices, or there is no room
        with torch.no_grad():
            compat.copy_together(copies.values, [p.detach() for p in parameters])
        found = tuple(parameters)
        bad = BadResult("gradient", "train", step, self._log.snapshot(), (), parameters=found, since=since)
        self._waiting = FiniteFlag([norm]), bad, copies, weakref.ref(optimizer)

    def read(self) -> None:
        """Tell of the last update's gradients if they were bad. Waits for the device to have come to that update."""
        if self._waiting is None:
            return
        (flag, bad, copies, known), self._waiting = self._waiting, None
        if flag.is_set() or all(is_finite(p.detach()) for p in bad.parameters):
            return  # (a norm may overflow although the gradients are finite)
        tell_calls(bad.record)
        weights = tuple(zip(bad.parameters, copies.values, strict=True))
        optimizer = known()
        if optimizer is not None:
            self._copies[optimizer] = None  # what is told of keeps these; the weights are bad from here on
        self._report(dataclasses.replace(bad, weights=weights))

    def _room_for(self, parameters: list[Tensor]) -> _Copies | None:
        room = available_bytes(parameters)
        if room is not None and sum(p.numel() * p.element_size() for p in parameters) > MEMORY_SHARE * room:
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
