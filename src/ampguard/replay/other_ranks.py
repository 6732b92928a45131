"""In the place of the other ranks: a step whose script calls collectives is given what these brought in the step."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.events.operands import held_by
from ampguard.capture.ranks.collectives import Call, Collectives, Received
from ampguard.capture.record import BackwardCall, Event, GlueOp
from ampguard.errors import ReplayError
from ampguard.incident import WAS_SENT
from ampguard.numerics import is_finite
from ampguard.replay.trace import identical
from ampguard.replay.tracer import ReplayMode


@contextlib.contextmanager
def answered(known: Collectives, mode: ReplayMode, scale_factor: float = 1.0) -> Iterator[None]:
    """Collectives that the script calls meanwhile are answered from what is known.

    `scale_factor`: how much larger the loss scale is than in the step. So are the gradients that others would have sent.
    """
    before, known.replay = known.replay, _Answers(known, mode, scale_factor)
    try:
        yield
    finally:
        known.replay = before


def check_what_was_sent(events: Iterable[Event], known: Collectives) -> None:
    """Raise ReplayError where the step outside modules rests on what other ranks sent, and that was bad already."""
    for event in events:
        for held in held_by(event) if isinstance(event, GlueOp) else ():
            received = known.behind(held.tensor)
            if received is not None:
                _check(received)


def _check(received: Received) -> None:
    if received.own is not None and not is_finite(received.own):
        return  # this rank's own part of the sum is to blame
    if not all(is_finite(tensor) for tensor in received.from_others):
        raise ReplayError(f"{WAS_SENT} ({received.name}) was not finite already: its own report says why")


class _Answers:
    """One replay's."""

    def __init__(self, known: Collectives, mode: ReplayMode, scale_factor: float) -> None:
        self._known = known
        self._mode = mode
        self._scale_factor = scale_factor
        self._called: collections.Counter[int] = collections.Counter()

    def called(self, call: Call) -> None:
        event = self._mode.event
        if (not call.written and call.objects is None) or event is None:
            return  # a barrier; what is sent
        received = self._next(event.index, call)
        values = received.values
        if values is None:
            raise ReplayError(f"what the other ranks sent ({call.name}) was changed in place since")
        _check(received)
        if call.objects is not None and received.objects is not None:
            call.objects[:] = received.objects
            return
        is_of_gradients = isinstance(event, BackwardCall) and not torch.is_grad_enabled()  # else it is computed again
        factor = self._scale_factor if is_of_gradients else 1.0
        for position, (tensor, value) in enumerate(zip(call.written, values, strict=True)):
            if position == received.mine and call.put_in is not None:
                with torch.no_grad():
                    tensor.copy_(call.put_in)  # seen by the mode: this part was made here
            elif received.own is not None:
                _add_up(tensor, value, received, factor)
            else:
                with compat.unseen(), torch.no_grad():
                    tensor.copy_(value if factor == 1.0 else value * factor)

    def _next(self, event: int, call: Call) -> Received:
        """What this call brought in the step."""
        many, number = self._known.of(event), self._called[event]
        self._called[event] += 1
        fits = number < len(many) and many[number].name == call.name
        if fits and call.objects is None:
            fits = [t.shape for t in call.written] == [t.shape for t, _ in many[number].kept]
        if not fits:
            raise ReplayError(f"what the other ranks sent ({call.name}) was not kept")
        return many[number]


def _add_up(tensor: Tensor, value: Tensor, received: Received, factor: float) -> None:
    """The sum over all ranks, with what this one puts in now. `tensor`: that; to be overwritten."""
    assert received.own is not None
    with compat.unseen(), torch.no_grad():
        if factor == 1.0 and identical(tensor.detach(), received.own) and is_finite(value):
            tensor.copy_(value)
            return
        others = factor * (value.to(tensor.dtype) - received.own.to(tensor.dtype))
        others = torch.where(torch.isfinite(others), others, torch.zeros_like(others))
    if received.is_sum:
        with torch.no_grad():
            tensor.add_(others)  # seen by the mode: it goes on with what was made here
