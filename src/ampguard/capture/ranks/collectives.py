"""What a script's own collectives have brought: a step that needs other ranks is run again from what these sent.

Contrastive losses gather the features of all ranks, DINO averages its center over them, a Sinkhorn loop sums its rows. A
replay of one rank must not wait for the others, and need not: what they sent is kept, beside what this rank put in.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from torch import Tensor

from ampguard import compat
from ampguard.capture.events.log import EventLog
from ampguard.capture.ranks.summed import SummedUp
from ampguard.capture.root_calls.trees import tensors_in

MAX_COPY = 1 << 20
"""Elements up to which a result is copied. A larger one is held, and lost once the script writes to it."""

MAX_BYTES = 1 << 26
"""Kept of two iterations; what comes after that is not."""

RESULTS = {
    "all_gather": 0,
    "all_gather_into_tensor": 0,
    "all_reduce": 0,
    "broadcast": 0,
    "reduce": 0,
    "reduce_scatter": 0,
    "reduce_scatter_tensor": 0,
    "all_to_all": 0,
    "all_to_all_single": 0,
    "gather": 1,
    "scatter": 0,
    "recv": 0,
    "irecv": 0,
    "batch_isend_irecv": 0,
    "all_gather_object": 0,
    "broadcast_object_list": 0,
    "gather_object": 1,
    "scatter_object_list": 0,
    "recv_object_list": 0,
}
"""The collectives of `torch.distributed`, and the position of what each writes to."""

SENDS = ("barrier", "send", "isend", "send_object_list")
"""Those that bring nothing."""

POSTED = ("isend", "irecv", "batch_isend_irecv")
"""Those that always return before they have written."""

BRING_DATA = ("recv", "irecv", "batch_isend_irecv", "broadcast", "scatter")
"""Those by which a rank is given what another one has computed or read: a stage of a pipeline, its gradient, a batch."""

NOTED = 64
"""Tensors that such a collective wrote to, of the last ones."""

REDUCE = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor")
"""Those by which gradients may be averaged."""

SUMS = ("all_reduce", "reduce")
"""Those whose operand is overwritten by a reduction that it is a part of."""


@dataclass(slots=True)
class Call:
    """A collective of the script's. `is_done`: it does not return before it has written.

    `put_in`: what this rank gives. `mine`: the position of this rank's part in a gathered list. `is_sum`: of all ranks.
    `objects`: a list of any objects, which is filled; `written` are then none.
    """

    name: str
    written: list[Tensor]
    put_in: Tensor | None
    mine: int | None
    is_sum: bool
    is_done: bool
    objects: list[Any] | None = None


@dataclass(slots=True)
class Received:
    """One collective. `kept`: what it wrote to, each with its version where it is no copy.

    `own`: what this rank put in, where that was overwritten. `mine`: the position of this rank's part among `kept`.
    `objects`: what a list was filled with; `kept` are then the tensors in it.
    """

    name: str
    kept: list[tuple[Tensor, int | None]]
    own: Tensor | None
    mine: int | None
    is_sum: bool
    objects: list[Any] | None = None
    is_of_norm: bool = False
    """Whether SyncBatchNorm has called it, for its statistics."""

    @property
    def from_others(self) -> list[Tensor]:
        """What was written and is not this rank's part."""
        return [tensor for position, (tensor, _) in enumerate(self.kept) if position != self.mine]

    @property
    def values(self) -> list[Tensor] | None:
        """What was written; None where the script has written to it since."""
        if any(version is not None and version != compat.version_of(tensor) for tensor, version in self.kept):
            return None
        return [tensor for tensor, _ in self.kept]


@dataclass(slots=True)
class Begun:
    """A collective that is running. `own`: what it overwrites, where that is a part of what it brings."""

    own: Tensor | None
    summed: SummedUp | None


class Replay(Protocol):
    """Answers in the place of the other ranks while a step is run again."""

    def called(self, call: Call) -> None:
        """Write what the collective has written in the step."""


class Collectives:
    """Those that the last iterations have called, by the event in which they were."""

    def __init__(self, log: EventLog) -> None:
        self.replay: Replay | None = None
        self.on_reduced: Callable[[FrameType], object] | None = None
        """Told where several numbers were reduced behind a backward pass: gradients, say."""
        self.reduces_unscaled = False
        """Whether that was so when the scaler had looked at this rank's own already."""
        self._log = log
        self._received: dict[int, list[Received]] = {}
        self._given: dict[int, tuple[Tensor, Received]] = {}
        """By identity: tensors outside modules that a collective wrote to."""
        self._given_before: dict[int, tuple[Tensor, Received]] = {}
        """In the last iteration."""
        self._brought: deque[tuple[weakref.ref[Tensor], str]] = deque(maxlen=NOTED)
        self._bytes = 0
        self._iteration = 0
        self._before = 0

    def of(self, event: int) -> list[Received]:
        """Those that were called in an event, in their order."""
        return self._received.get(event, [])

    def behind(self, tensor: Tensor) -> Received | None:
        """The collective that gave a tensor outside modules its value."""
        known = self._given.get(id(tensor)) or self._given_before.get(id(tensor))
        return known[1] if known is not None and known[0] is tensor else None

    def are_in(self, events: Iterable[int]) -> bool:
        """Whether any was called in one of these events, but for what SyncBatchNorm sends."""
        return any(not received.is_of_norm for event in events for received in self.of(event))

    @property
    def are_between_calls(self) -> bool:
        """Whether any has brought something outside modules on this iteration's way to a loss."""
        return bool(self._given) and self._log.iteration_start == self._iteration

    def brought(self) -> list[tuple[Tensor, str]]:
        """What other ranks have sent outside modules, and the name of the collective; the latest first."""
        return [(tensor, name) for known, name in reversed(self._brought) if (tensor := known()) is not None]

    def before(self, call: Call, is_outside: bool, frame: FrameType) -> Begun:
        """A collective is about to write. What it overwrites and reads, too, is kept as far as that is small."""
        is_in_loss = is_outside and self._log.has_open_events
        if is_in_loss:
            for tensor in call.written:
                self._log.keep_for_readers(tensor)
        reads = call.name in SUMS and all(t.numel() <= MAX_COPY for t in call.written)
        if not reads or len(call.written) != 1 or (is_outside and not is_in_loss):
            return Begun(None, None)
        (tensor,) = call.written
        is_followed = is_in_loss and call.is_sum and call.is_done and not tensor.requires_grad
        if is_followed and tensor.is_floating_point():
            summed = SummedUp(self._log, tensor, frame)
            return Begun(summed.own, summed)
        return Begun(tensor.detach().clone(), None)

    def after(self, call: Call, begun: Begun, is_outside: bool, frame: FrameType) -> None:
        """It has written, or will have once it has been waited for."""
        if is_outside and call.name in BRING_DATA:
            self._brought.extend((weakref.ref(tensor), call.name) for tensor in call.written)
        is_in_loss = is_outside and self._log.has_open_events
        is_behind = is_outside and (not is_in_loss or self._log.closed_until > self._log.iteration_start)
        if is_behind and self.on_reduced is not None and _may_average(call):
            self.on_reduced(frame)
        if is_outside and not is_in_loss:
            return  # gradients, say: what comes is computed from what is there then
        if not call.written and call.objects is None:
            return  # this rank was sent nothing
        self._forget_old()
        objects = list(call.objects) if call.objects is not None else None
        written = call.written if objects is None else tensors_in(objects)
        kept: list[tuple[Tensor, int | None]] = []
        for tensor in written:
            if self._bytes > MAX_BYTES:
                return
            self._bytes += tensor.nbytes
            is_small = call.is_done and objects is None and tensor.numel() <= MAX_COPY
            kept.append((tensor.detach().clone(), None) if is_small else (tensor, compat.version_of(tensor)))
        is_of_norm = compat.is_called_by_norm(frame)
        received = Received(call.name, kept, begun.own, call.mine, call.is_sum, objects, is_of_norm)
        if is_outside:
            self._given_outside(call, written, begun, received, frame)
        else:
            self._received.setdefault(self._log.next_index - 1, []).append(received)

    def _given_outside(
        self, call: Call, written: list[Tensor], begun: Begun, received: Received, frame: FrameType
    ) -> None:
        """Outside modules nothing is called again: what was written is given, but for what this rank has put in."""
        for position, tensor in enumerate(written):
            if tensor.requires_grad:
                continue  # a loss that is averaged for the log: it is followed as this rank has made it
            self._log.written_by_others(tensor)
            if begun.summed is not None:
                value = begun.summed.became(tensor)
                self._given[id(value)] = (value, received)
            elif position == call.mine and call.put_in is not None:
                self._log.is_copy_of(tensor, call.put_in, frame)
            else:
                self._given[id(tensor)] = (tensor, received)

    def _forget_old(self) -> None:
        """Of iterations before the last nothing is asked any more."""
        if self._log.iteration_start == self._iteration:
            return
        self._received = {index: many for index, many in self._received.items() if index >= self._before}
        self._before, self._iteration = self._iteration, self._log.iteration_start
        self._given_before, self._given = self._given, {}
        self._bytes = sum(t.nbytes for many in self._received.values() for one in many for t, _ in one.kept)


def _may_average(call: Call) -> bool:
    """Whether it may average gradients: it is given more than a figure for the log."""
    written = call.written
    return call.name in REDUCE and bool(written) and written[0].is_floating_point() and written[0].numel() > 1
