"""What is kept of the running step, and what its tensors are called.

Tensors that an event made are named by `Ref` and held weakly, all others are held. Everything here runs in every healthy
step, hence the plain loops. Nothing writes to a tensor of the script.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ampguard.capture.events.ahead import PreparedAhead
from ampguard.capture.events.arguments import ArgumentCopies
from ampguard.capture.events.forgetting import OpenWindow
from ampguard.capture.events.holders import Holders
from ampguard.capture.events.lineage import has_graph
from ampguard.capture.events.long_evaluation import LongEvaluation
from ampguard.capture.events.operands import refs_of
from ampguard.capture.events.pending import PendingEvents
from ampguard.capture.events.producers import Producers
from ampguard.capture.events.tangents import Tangents
from ampguard.capture.events.written_weights import WrittenWeights
from ampguard.capture.glue.taped_calls import TapedCall, WritingCall
from ampguard.capture.record import BackwardCall, Event, GlueOp, Held, HeldGenerator, Ref, RootCall, StepRecord, since
from ampguard.capture.root_calls.trees import PLAIN_TYPES
from ampguard.compat import plain_version, version_of, whole_of

MAX_EVENTS = 16384
"""Events kept of one step; beyond it the record is incomplete."""

SWEEP_EVENTS = 48
"""Events after which those with dead results are dropped, in a loop that does not differentiate."""

LOST = -2
"""The version of what was held and overwritten unseen: it is not had any more."""


class KeptEvents:
    """The events of the current step, and the tensors that they made."""

    def __init__(self) -> None:
        self._record = StepRecord()
        self._pending = PendingEvents()
        """What has been kept since, in short."""
        self.most = MAX_EVENTS
        """Events that are kept at most."""
        self.next_index = 0
        self.set_aside = 0
        """Indices before the next one that are those of no event: a call that is kept as one has room for its operators."""
        self.closed_until = 0
        """Events before it lie before the last backward pass."""
        self.iteration_start = 0
        """The first event of the running iteration."""
        self.goes_on_after_backward = False
        """True once an operator used what was computed before a backward pass (one more loss of the same graph), or a module
        what was computed after one: the next part of an accumulated batch."""
        self.ahead = PreparedAhead()
        self.producers = Producers()
        self._sweep_at = SWEEP_EVENTS
        self._rests_until = 0
        """Events from which on it is seen again which of them are still in use: a quarter more than were found to be."""
        self._forgot = (0, 0)
        """Up to which event was last forgotten what is not in use, and how many there were then."""
        self.arguments = ArgumentCopies()
        self._holders = Holders()
        self._window = OpenWindow()
        self.evaluation = LongEvaluation()
        self.written = WrittenWeights()
        self.tangents = Tangents()
        self.runs_modules = False
        """Whether a module is running whose operators are kept one by one: in a transform of `torch.func`."""

    def claim_index(self) -> int:
        index = self.next_index
        self.next_index += 1
        return index

    @property
    def kept(self) -> int:
        """Events that were kept so far."""
        return self.next_index - self.set_aside

    @property
    def record(self) -> StepRecord:
        """The step so far."""
        if self._pending.entries:
            self.settle()
        return self._record

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return not self._record.events and not self._pending.entries

    @property
    def is_full(self) -> bool:
        """Whether nothing more is kept."""
        return len(self._record.events) >= self.most

    @property
    def size(self) -> int:
        """Events that are kept."""
        return len(self._record.events) + len(self._pending.entries)

    @property
    def size_of_iteration(self) -> int:
        """Of those, the running iteration's."""
        events, pending = self._record.events, len(self._pending.entries)
        if not events:
            return pending
        return len(events) - bisect_left(events, self.iteration_start, key=attrgetter("index")) + pending

    def append(self, event: Event) -> None:
        self.record.events.append(event)

    def append_named(self, event: Event) -> None:
        """Keep an event whose operands are named; what came before it is not settled for that."""
        if self._pending.entries:
            self._pending.entries.append((event, (), ()))
        else:
            self._record.events.append(event)

    @property
    def has_open_events(self) -> bool:
        """Whether anything was recorded since the last backward pass."""
        pending = self._pending.entries
        if pending:
            return pending[-1][0].index >= self.closed_until
        events = self._record.events
        return bool(events) and events[-1].index >= self.closed_until

    def kept_since(self, index: int) -> list[Event]:
        """The events from `index` on, of which nothing is settled: only their results, and whose calls they are, are known."""
        events = since(self._record.events, index)
        return [*events, *self._pending.events()] if self._pending.entries else events

    def latest(self, index: int) -> list[Event]:
        """The same, also of what is pending those from `index` on: a few at the end of many, mostly."""
        entries = self._pending.entries
        first = size = len(entries)
        while first and entries[first - 1][0].index >= index:
            first -= 1
        found: list[Event] = [entry[0] for entry in entries[first:]] if first < size else []
        return found if first else [*since(self._record.events, index), *found]

    def event_at(self, index: int) -> Event | None:
        """The event of an index, pending or not; None where it is not kept."""
        entries = self._pending.entries
        if not entries or entries[0][0].index > index:
            return self._record.event(index)
        position = bisect_left(entries, index, key=lambda entry: entry[0].index)
        event = entries[position][0] if position < len(entries) else None
        return event if event is not None and event.index == index else None

    def computes_with_gradients(self, lately: int) -> bool:
        """Whether any of the last events has made something that can be differentiated; nothing is settled for that."""
        return any(map(has_graph, self.kept_since(0)[-lately:]))

    def is_incomplete(self) -> None:
        """Something has happened that nobody has kept."""
        self._record.complete = False

    def settle(self) -> None:
        """Name the operands of what is pending."""
        for event, versions, more in self._pending.take():
            if versions and type(event) is BackwardCall:
                event.args = (tuple(self._named_then(event.args[0], versions)), None, None)
            elif isinstance(event, TapedCall):
                if len(self._record.events) >= self.most:
                    self._record.complete = False
                    continue
                self._settle_call(event, versions, more)
            self._record.events.append(event)

    def _settle_call(self, call: TapedCall, versions: Sequence[int], more: Sequence[int]) -> None:
        call.args = tuple(self._named_then(call.args, versions))
        if call.kwargs:
            call.kwargs = dict(zip(call.kwargs, self._named_then(call.kwargs.values(), more), strict=True))
        if isinstance(call, WritingCall):
            self._settle_write(call, versions[0])
            return
        for position, ref in enumerate(call.outputs):
            tensor = ref()
            if tensor is not None and not self.producers.is_known_since(tensor, call.made[position]):
                self.producers.put(tensor, ref, Ref(call.index, position), call.made[position])
        self._note_reuse(call, any((tensor := ref()) is not None and tensor.requires_grad for ref in call.outputs))

    def _settle_write(self, call: WritingCall, version: int) -> None:
        written, before = call.operands[0][0], call.before
        if before is None:  # the value of those that have read it since the first write, by another name, is not known
            for held in self._holders.under_other_names(written, self._record.events):
                held.version = LOST
            whole = whole_of(written)
            for held in self._holders.of(whole, self._record.events) if whole is not None else ():
                held.is_overwritten_again_in(written, version)
        if before is not None:
            self._keep_for_earlier(written, version, before)
            if call.is_first or type(call.args[0]) is Held:
                call.args = (Held(written, version, before), *call.args[1:])
            for operand in call.args[1:]:  # `weight.sub_(weight)`
                if type(operand) is Held and operand.tensor is written:
                    operand.copy = before
        self.producers.note_write(written, call, version)

    def _keep_for_earlier(self, written: Tensor, version: int, before: Tensor) -> None:
        """Events that were given a tensor which has been overwritten since keep its value."""
        for held in self._holders.of(written, self._record.events):
            if held.version == version and held.copy is None:
                held.copy = before
        now = version_of(written)
        whole = whole_of(written)
        for held in self._holders.of(whole, self._record.events) if whole is not None else ():
            held.is_overwritten_in(written, before, version)
        for held in self._holders.under_other_names(written, self._record.events):
            is_counted_alike = held.version == version and version_of(held.tensor) == now  # a `.detach()`
            if held.is_intact or is_counted_alike:
                held.copy = before
            else:
                held.version = LOST

    def _named_then(self, values: Iterable[Any], versions: Sequence[int]) -> list[Any]:
        """Operands as the record keeps them, each as it was at the given version."""
        return [
            (self.lookup(value, version) or Held(value, version)) if isinstance(value, Tensor) else self.named(value)
            for value, version in zip(values, versions, strict=True)
        ]

    def _note_reuse(self, op: GlueOp, has_gradient: bool) -> None:
        """Was more made of a graph that was differentiated before? A detached loss or a count of hits is nothing more."""
        events, closed = self._record.events, self.closed_until
        if self.goes_on_after_backward or not has_gradient or not events or not events[0].index < closed <= op.index:
            return
        if op.grad and any(op.floating) and op.func is not torch.ops.aten.detach.default:
            self.goes_on_after_backward = any(r.event < closed and self._wants_gradient(r) for r in refs_of(op))

    def _wants_gradient(self, ref: Ref) -> bool:
        event = self.record.event(ref.event)
        tensor = event.outputs[ref.output]() if event is not None and ref.output < len(event.outputs) else None
        return tensor is None or tensor.requires_grad

    def lookup(self, tensor: Tensor, version: int | None = None) -> Ref | None:
        """The event that gave this very tensor object its present value (or that at a `version`), if one did.

        A tensor that was written to since, through a view or by an operator that was not recorded, has none.
        """
        if version is None:
            version = version_of(tensor)
            if self._pending.entries:
                name = self._pending.name_of(tensor, version)
                if name is not None:
                    return name
                if self._may_be_renamed(tensor):
                    self.settle()
        ref = self.producers.of(tensor, version)
        if ref is not None and (ref.event < self.closed_until or ref.event < self.iteration_start):
            pending = self._pending.entries
            record = self.record if pending and pending[0][0].index <= ref.event else self._record
            event = record.event(ref.event)
            is_of_past = ref.event < self.closed_until and ref.event < self.iteration_start
            if event is None or (is_of_past and not self._can_run_again(event)):
                return None  # glue of a finished step is not kept, nor what a call was given that only it had made
        return ref

    def _may_be_renamed(self, tensor: Tensor) -> bool:
        """Whether what is pending has made a tensor that was written to since, perhaps under another name."""
        if self._pending.has_made(tensor):
            return True
        made_by = self.producers.maker_of(tensor) if self._pending.last_write >= 0 else None
        return made_by is not None and self._pending.is_written_since(tensor, made_by)

    def _can_run_again(self, event: Event) -> bool:
        """Whether a call of a finished step still has all that it was given (an RNN's hidden state was made by glue, which
        is about to be forgotten where it is still there)."""
        return event.index in self.ahead.kept or (
            isinstance(event, RootCall) and all(self._is_kept(ref.event) for ref in refs_of(event))
        )

    def _is_kept(self, index: int) -> bool:
        event = self._record.event(index)
        if event is None or index >= self.iteration_start or index in self.ahead.kept:
            return event is not None
        return isinstance(event, RootCall) and self._can_run_again(event)

    def define(self, tensor: Tensor, ref: Ref) -> weakref.ref[Tensor]:
        """A module has returned this tensor; perhaps it is one that it was given, and has written to."""
        if self._pending.entries and (self._pending.has_made(tensor) or self.producers.maker_of(tensor) is not None):
            self.settle()
        return self.producers.define(tensor, ref)

    def named(self, value: Any) -> Any:
        """An operand as the record keeps it."""
        kind = type(value)
        if kind in PLAIN_TYPES:
            return value
        if kind is Tensor or isinstance(value, Tensor):
            return self.lookup(value) or Held(value, version_of(value))
        if kind is list or kind is tuple:
            return [self.named(item) for item in value]
        if kind is torch.Generator:
            return HeldGenerator(value.device, value.get_state())
        return value

    def is_made_outside(self, tensor: Tensor) -> bool:
        """Whether an operator outside modules has made it, as far as is recorded."""
        made = self.lookup(tensor)
        return made is not None and type(self.record.event(made.event)) is not RootCall

    def named_argument(self, tensor: Tensor) -> Ref | Held:
        """An argument of a module."""
        version = -1 if tensor.is_inference() else plain_version(tensor)
        if id(tensor) in self.producers.known or self._pending.entries:
            known = self.lookup(tensor)
            if known is not None:
                return known
        return self.arguments.hold(tensor, version)

    def _named_by_pending(self, tensor: Tensor) -> Ref | Held:
        """A tensor that no settled event has made."""
        version = version_of(tensor)
        return (self._pending.name_of(tensor, version) if self._pending.entries else None) or Held(tensor, version)
