"""The event log: what is kept of the running step.

Tensors that an event made are named by `Ref` and held weakly, all others are held. Everything here runs in every healthy
step, hence the plain loops. Nothing writes to a tensor of the script.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import attrgetter
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from ampguard import compat
from ampguard.capture.ahead import PreparedAhead
from ampguard.capture.arguments import MAX_COPY, ArgumentCopies
from ampguard.capture.cutting import cut_before
from ampguard.capture.forgetting import (
    KEPT_ROOTS,
    OpenWindow,
    has_live_result,
    is_evaluating,
    still_used,
)
from ampguard.capture.frames import user_line
from ampguard.capture.holders import Holders
from ampguard.capture.lineage import has_graph
from ampguard.capture.long_evaluation import LongEvaluation
from ampguard.capture.preprocessing import uses_computed
from ampguard.capture.producers import Producers
from ampguard.capture.record import (
    PLAIN_TYPES,
    BackwardCall,
    Event,
    GlueOp,
    Held,
    HeldGenerator,
    Line,
    Ref,
    RngStates,
    RootCall,
    StepRecord,
    TapedCall,
    refs_of,
    since,
)
from ampguard.capture.surroundings import current_modes
from ampguard.capture.told import MAX_CALL_OPERATORS, is_plain, tell_calls
from ampguard.capture.written_weights import WrittenWeights
from ampguard.compat import plain_version, version_of

MAX_EVENTS = 16384
"""Events kept of one step; beyond it the record is incomplete."""

SWEEP_EVENTS = 48
"""Events after which those with dead results are dropped, in a loop that does not differentiate."""

SETTLED_AT = 512
"""Events that may be pending when the next module is called."""

_Pending: TypeAlias = tuple[TapedCall | BackwardCall | RootCall, Sequence[int], Sequence[int]]
"""What is yet to be named, and the versions of its operands: those by position, those by name. Calls of modules that come
after such events are named, and only wait for their turn."""


class EventLog:
    """The events of the current step, and the tensors that they made."""

    def __init__(self) -> None:
        self._record = StepRecord()
        self._pending: list[_Pending] = []
        """What has been kept since, in short. Most steps are forgotten before anybody asks for more."""
        self._made: dict[int, TapedCall] = {}
        """Of these, by the identity of the result, the calls."""
        self.next_index = 0
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

    # --- adding -----------------------------------------------------------------------------------------------------

    def claim_index(self) -> int:
        index = self.next_index
        self.next_index += 1
        return index

    @property
    def record(self) -> StepRecord:
        """The step so far."""
        if self._pending:
            self.settle()
        return self._record

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return not self._record.events and not self._pending

    @property
    def is_full(self) -> bool:
        """Whether nothing more is kept."""
        return len(self._record.events) >= MAX_EVENTS

    @property
    def size(self) -> int:
        """Events that are kept."""
        return len(self._record.events) + len(self._pending)

    @property
    def size_of_iteration(self) -> int:
        """Of those, the running iteration's."""
        events = self._record.events
        return len(events) - bisect_left(events, self.iteration_start, key=attrgetter("index")) + len(self._pending)

    def append(self, event: Event) -> None:
        self.record.events.append(event)

    def append_root(self, root: RootCall) -> None:
        """Keep a call whose arguments are named; what came before it is not settled for that."""
        if self._pending:
            self._pending.append((root, (), ()))
        else:
            self._record.events.append(root)

    @property
    def latest(self) -> int:
        """The index of the last event; -1 where there is none."""
        events = self._record.events
        return self._pending[-1][0].index if self._pending else events[-1].index if events else -1

    def take_back(self, event: Event) -> None:
        """Drop an event that has just been added: it turned out to be none of this log's."""
        events = self.record.events
        events[:] = [one for one in events if one is not event]

    @property
    def has_open_events(self) -> bool:
        """Whether anything was recorded since the last backward pass."""
        return self.latest >= self.closed_until

    def has_open_call(self, module: Module | None) -> bool:
        """Whether a module (None: any) was called since the last backward pass; nothing is settled for that."""
        waiting = [call for call, *_ in self._pending] if self._pending else ()
        for event in (*waiting, *since(self._record.events, self.closed_until)):
            if type(event) is RootCall and event.index >= self.closed_until and module in (None, event.module):
                return True
        return False

    def computes_with_gradients(self, lately: int) -> bool:
        """Whether any of the last events has made something that can be differentiated; nothing is settled for that."""
        pending = [call for call, *_ in self._pending[-lately:]]
        return any(map(has_graph, [*self._record.events[-lately:], *pending][-lately:]))

    def keep_call(
        self, func: Any, args: Any, kwargs: dict[str, Any], output: Any, versions: list[int], line: Line | None
    ) -> None:
        """Keep a call that has done nothing but compute, instead of its operators. `versions`: those of its `args`."""
        if type(output) is Tensor:
            outputs = [weakref.ref(output)]
            made: Sequence[int] = (-1 if output.is_inference() else plain_version(output),)
            floating = [output.dtype.is_floating_point]
        else:
            if not output or not all(isinstance(value, Tensor) for value in output):
                return
            outputs = [weakref.ref(value) for value in output]
            made = versions_in(output)
            floating = [value.dtype.is_floating_point for value in output]
        if len(self._pending) >= MAX_EVENTS:
            self._record.complete = False
            return
        index = self.next_index + MAX_CALL_OPERATORS - 1
        self.next_index = index + 1
        more = versions_in(kwargs.values()) if kwargs else ()
        modes = current_modes()
        grad = modes.grad
        call = TapedCall(
            index, func, args, kwargs, line, grad, None, outputs, floating, None, None, 0, (args, kwargs), modes, made
        )
        self._pending.append((call, versions, more))
        self._made[id(output)] = call

    def lost_count(self) -> None:
        """Something was written that nobody has kept."""
        self.record.complete = False

    def keep_backward(self, call: BackwardCall) -> None:
        """Keep a call of `backward` whose arguments are the tensors themselves: they are named when they are asked for."""
        self._pending.append((call, versions_in(call.args[0]), ()))

    def settle(self) -> None:
        """Name the operands of what is pending."""
        pending, self._pending, self._made = self._pending, [], {}
        for call, versions, more in pending:
            if isinstance(call, RootCall):
                pass
            elif isinstance(call, BackwardCall):
                call.args = (tuple(self._named_then(call.args[0], versions)), None, None)
            elif len(self._record.events) < MAX_EVENTS:
                self._settle_call(call, versions, more)
            else:
                self._record.complete = False
                continue
            self._record.events.append(call)

    def _settle_call(self, call: TapedCall, versions: Sequence[int], more: Sequence[int]) -> None:
        call.args = tuple(self._named_then(call.args, versions))
        if call.kwargs:
            call.kwargs = dict(zip(call.kwargs, self._named_then(call.kwargs.values(), more), strict=True))
        for position, ref in enumerate(call.outputs):
            tensor = ref()
            if tensor is not None:
                self.producers.put(tensor, ref, Ref(call.index, position), call.made[position])
        self._note_reuse(call, any((tensor := ref()) is not None and tensor.requires_grad for ref in call.outputs))

    def _named_then(self, values: Iterable[Any], versions: Sequence[int]) -> list[Any]:
        """Operands as the record keeps them, each as it was at the given version."""
        return [
            (self.lookup(value, version) or Held(value, version)) if isinstance(value, Tensor) else self.named(value)
            for value, version in zip(values, versions, strict=True)
        ]

    def is_one_computation(self, began: int, output: Any) -> bool:
        """Whether the events from `began` on do nothing but compute, and one of them made all of `output`."""
        events = since(self.record.events, began)
        if not events or len(events) > MAX_CALL_OPERATORS:
            return False
        if not all(type(event) is GlueOp and is_plain(event) for event in events):
            return False
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        made = [self.lookup(tensor) if isinstance(tensor, Tensor) else None for tensor in outputs]
        first = made[0] if made else None
        return first is not None and first.event >= began and made == [Ref(first.event, i) for i in range(len(made))]

    def keep_plain(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, is_view: bool, frame: Any
    ) -> None:
        """Keep an operator that has run and that changed none of its operands: the common case, in one go."""
        if args and output is args[0]:
            return  # `lift_fresh`, `contiguous` of what is contiguous: nothing happened
        op = self.add_operator(func, args, kwargs, None, frame)
        if op is None:
            return
        if is_view and args and isinstance(args[0], Tensor):
            self.producers.add_views(op, args[0], output)
        elif type(output) is Tensor:
            ref = weakref.ref(output)
            self.producers.put(output, ref, Ref(op.index, 0), version_of(output))
            op.outputs.append(ref)
            op.floating.append(output.dtype.is_floating_point)
        else:
            self.add_results(op, output, writes=False)
        first = next(iter(self._record.events), None)  # (another thread may have begun a new record)
        if not self.goes_on_after_backward and first is not None and first.index < self.closed_until:
            self._note_reuse(op, any(isinstance(value, Tensor) and value.requires_grad for value in args))

    def add_operator(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rng: RngStates | None, frame: Any
    ) -> GlueOp | None:
        """Keep one operator that runs outside every module. None where the record is full."""
        events = self.record.events
        if len(events) >= MAX_EVENTS:
            self._record.complete = False
            return None
        producers, closed = self.producers.known, self.closed_until
        named: list[Any] = []
        for value in args:
            kind = type(value)
            if kind is Tensor:
                known = producers.get(id(value))
                if known is None:
                    named.append(Held(value, version_of(value)))
                elif known[0]() is value and known[1].event >= closed and known[2] == version_of(value):  # type: ignore[arg-type]
                    named.append(known[1])
                else:
                    named.append(self.named(value))
            else:
                named.append(value if kind in PLAIN_TYPES else self.named(value))
        index = self.next_index
        op = GlueOp(
            index,
            func,
            tuple(named),
            {k: self.named(v) for k, v in kwargs.items()} if kwargs else kwargs,
            user_line(frame),
            torch.is_grad_enabled(),
            rng,
            [],
            [],
            None,
            compat.derivative_number(),
            compat.next_node_number(),
        )
        self.next_index = index + 1
        events.append(op)
        return op

    def finds_prepared_ahead(self, given: Any) -> bool:
        """Is this the first time that what a call is given was computed in an iteration before?"""
        if self.ahead.is_usual or not self._record.events or self._record.events[0].index >= self.iteration_start:
            return False
        return self.ahead.learn(given, self.record.events, self.iteration_start, self.producers)

    def note_prepared(self, root: RootCall) -> None:
        """Was something prepared for this call since the last backward pass of the same iteration?"""
        if self.iteration_start < self.closed_until:
            later = [*since(self.record.events, self.closed_until), root]
            prepared = uses_computed(later, self.closed_until, root.index, self.producers.writers)
            self.goes_on_after_backward |= prepared or self._were_weights_written(root)

    def _were_weights_written(self, root: RootCall) -> bool:
        """Whether the script wrote to weights since the last backward pass, also under another name (`.data`)."""
        events = [e for e in since(self.record.events, self.closed_until) if isinstance(e, GlueOp) and e.args]
        targets = (self.record.tensor_behind(e.args[0]) for e in events if compat.positions_written(e.func) == {0})
        written = [tensor for tensor in targets if tensor is not None]
        if not written:
            return False
        memory = {compat.storage_key(weight) for weight in root.module.parameters()} - {0}
        return any((t.requires_grad and t.is_leaf) or compat.storage_key(t) in memory for t in written)

    def _note_reuse(self, op: GlueOp, has_gradient: bool) -> None:
        """Was more made of a graph that was differentiated before? A detached loss or a count of hits is nothing more."""
        events, closed = self._record.events, self.closed_until
        if self.goes_on_after_backward or not has_gradient or not events or not events[0].index < closed <= op.index:
            return
        if op.grad and any(op.floating) and op.func is not torch.ops.aten.detach.default:
            self.goes_on_after_backward = any(r.event < closed and self._wants_gradient(r) for r in refs_of(op))

    def _wants_gradient(self, ref: Ref) -> bool:
        event = self._record.event(ref.event)
        tensor = event.outputs[ref.output]() if event is not None and ref.output < len(event.outputs) else None
        return tensor is None or tensor.requires_grad

    def add_results(self, op: GlueOp, output: Any, writes: bool) -> None:
        """Whatever an operator returned; with `writes`, operands that it wrote to."""
        for position, tensor in enumerate(output if isinstance(output, (tuple, list)) else (output,)):
            if not isinstance(tensor, Tensor):
                continue
            if writes:
                self.producers.note_write(tensor, op)
            else:
                self.producers.define(tensor, Ref(op.index, position))
            op.outputs.append(weakref.ref(tensor))
            op.floating.append(tensor.is_floating_point())

    # --- naming -----------------------------------------------------------------------------------------------------

    def lookup(self, tensor: Tensor, version: int | None = None) -> Ref | None:
        """The event that gave this very tensor object its present value (or that at a `version`), if one did.

        A tensor that was written to since, through a view or by an operator that was not recorded, has none.
        """
        if version is None:
            if self._pending:
                self.settle()
            version = version_of(tensor)
        ref = self.producers.of(tensor, version)
        if ref is not None and ref.event < self.closed_until:
            event = self._record.event(ref.event)
            if event is None or (ref.event < self.iteration_start and not self._can_run_again(event)):
                return None  # glue of a finished step is not kept, nor what a call was given that only it had made
        return ref

    def _can_run_again(self, event: Event) -> bool:
        """Whether a call of a finished step still has all that it was given (an RNN's hidden state was made by glue)."""
        return event.index in self.ahead.kept or (
            isinstance(event, RootCall) and all(self._record.event(ref.event) is not None for ref in refs_of(event))
        )

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

    def named_argument(self, tensor: Tensor) -> Ref | Held:
        """An argument of a module."""
        version = -1 if tensor.is_inference() else plain_version(tensor)
        call = self._made.get(id(tensor)) if self._pending else None
        if call is not None and call.outputs[0]() is tensor and call.made[0] == version:
            return Ref(call.index, 0)
        if id(tensor) in self.producers.known:
            known = self.lookup(tensor, version)
            if known is not None:
                return known
        return self.arguments.hold(tensor, version)

    def keep_for_readers(self, tensor: Tensor) -> None:
        """A tensor is about to be overwritten by what is not recorded: events that were given it keep its value."""
        if tensor.numel() > MAX_COPY or self.lookup(tensor) is not None:
            return
        readers = [
            held for held in self._holders.of(tensor, self.record.events) if held.copy is None and held.is_intact
        ]
        copy = tensor.detach().clone() if readers else None
        for held in readers:
            held.copy = copy

    def written_by_others(self, tensor: Tensor) -> None:
        """What is not recorded has written to it, and PyTorch has not counted that as a new version."""
        if self._pending:
            self.settle()
        self.producers.known.pop(id(tensor), None)

    def is_copy_of(self, tensor: Tensor, source: Tensor, frame: FrameType) -> None:
        """What is not recorded has written the value of `source` to it."""
        op = self.add_operator(torch.ops.aten.detach.default, (source,), {}, None, frame)
        if op is not None:
            self.add_results(op, tensor, writes=False)

    def copied(self, value: Any) -> Any:
        """An operand that the operator overwrites and that no event made: keep its value."""
        if not isinstance(value, Tensor) or self.lookup(value) is not None or value.numel() > MAX_COPY:
            return value
        version, copy = version_of(value), value.detach().clone()
        for held in self._holders.of(value, self.record.events):  # earlier readers saw this value too
            if held.version == version and held.copy is None:
                held.copy = copy
        for held in self._holders.under_other_names(value, self.record.events):
            if held.is_intact:
                held.copy = copy
        return Held(value, version, copy)

    # --- forgetting -------------------------------------------------------------------------------------------------

    def iteration_ended(self) -> None:
        """Glue of a finished step is not kept: what its calls computed from is the script's alone again."""
        ahead = self.ahead
        ahead.iteration_ended(self.iteration_start, self.record.events if ahead.is_usual or ahead.is_learning else ())
        self.iteration_start = self.next_index
        self.evaluation.clear()
        self.written.clear()
        record = self._record
        if self._pending:
            record.events += [call for call, *_ in self._pending if type(call) is RootCall]
            self._pending.clear()
            self._made.clear()
        self._holders.clear()
        if TapedCall in map(type, record.events):
            kept = self.ahead.kept
            record.events = [event for event in record.events if type(event) is not TapedCall or event.index in kept]

    def slice(self) -> StepRecord:
        """The record as it stands, for an investigation."""
        tell_calls(self.record)
        self._holders.clear()
        return self.snapshot()

    def snapshot(self) -> StepRecord:
        """The record as it stands; its calls are yet to be told."""
        record = self.record
        return StepRecord(list(record.events), record.complete, dict(self.producers.writers), self.iteration_start)

    def clear(self) -> None:
        self._record = StepRecord()
        self._pending.clear()
        self._made.clear()
        self.producers = Producers()
        self._holders.clear()

    def forget_finished(self, keep_all: bool) -> bool:
        """Drop the events before the last backward, and dead ones of a loop that never differentiates.

        Kept are events whose results are still in use (a GAN's fake image, an output of which a second loss is made),
        and those of an iteration whose optimizer has not stepped yet: its gradients are still to be judged.
        `keep_all`: something else is. True where events of a finished backward were dropped.
        """
        events = self._record.events
        if self.arguments.waiting:
            self.arguments.look()
        is_grad_enabled = torch.is_grad_enabled()
        has_closed = bool(events) and events[0].index < self.closed_until
        is_looked_through = has_closed and self._forgot[0] == self.closed_until
        if is_looked_through and is_grad_enabled and self.size < self._forgot[1] + SWEEP_EVENTS:
            return False  # another module of the same step: little more can be forgotten
        if self._pending and (not is_grad_enabled or self._must_settle(has_closed)):
            events = self.record.events
        if not keep_all and not is_grad_enabled:
            is_cut = self.evaluation.may_cut(len(events)) and self._cut(events)
            if is_cut or self.evaluation.is_under_way:
                return False
        elif len(events) >= MAX_EVENTS // 2 and not keep_all and not self._has_open_graph():
            self.clear()  # a long rollout: what is differentiated now is to be recorded whole
            return True
        if events and events[0].index < self.closed_until:
            if len(events) < self._rests_until:
                return False
            closed_until = self.closed_until
            if closed_until > self.iteration_start and not self._window.is_too_large(events):
                closed_until = self.iteration_start
                if events[0].index >= closed_until:
                    return False
            self._record.complete = True
            self._forgot = (self.closed_until, len(events))
            if events[-1].index < closed_until <= self.iteration_start and self._keep_roots(events):
                return True
            closed = [e for e in events if e.index < closed_until]
            if self.ahead.kept:
                self.ahead.look(closed)
            later = events[len(closed) :]
            self._keep(still_used(closed, later, self.iteration_start, self.producers.writers, self.ahead.kept))
            return True
        if not keep_all and self._may_sweep(events):
            tell_calls(self.record)  # their operands would keep each other alive
            events = self.record.events
            kept = still_used(events, [], self.iteration_start, self.producers.writers)
            if is_evaluating(events):
                self.evaluation.note_dropped(events, kept, self.producers.known)
            self._keep(kept)
            self._sweep_at = max(SWEEP_EVENTS, 2 * len(self.record.events))
        return False

    def _must_settle(self, has_closed: bool) -> bool:
        """Whether so much is kept that what is pending has to be counted and looked through with the rest."""
        size = self.size
        return len(self._pending) > SETTLED_AT or size > MAX_EVENTS // 2 or (not has_closed and size > self._sweep_at)

    def _has_open_graph(self) -> bool:
        """Whether anything that was made since the last backward pass, and is still there, wants a gradient."""
        made = (ref() for event in since(self._record.events, self.closed_until) for ref in event.outputs)
        return any(tensor is not None and tensor.requires_grad for tensor in made)

    def forget_before(self, start: int) -> None:
        """Drop the events before `start`, in a loop whose steps hang together: what they made and is in use is given."""
        events = self.record.events
        if events and events[0].index < start:
            self._record.events = cut_before(events, start)
            self._record.complete = True
            self.producers.forget({event.index for event in self._record.events})
            self._holders.clear()

    def _cut(self, events: list[Event]) -> bool:
        """If this is a long evaluation, all that it has made so far is given from here on."""
        closed = bisect_left(events, self.closed_until, key=attrgetter("index"))
        made = events[closed:]
        if not self.evaluation.may_cut(len(made)) or not is_evaluating(made):
            return False
        self.evaluation.cut(made, self.lookup, self.slice)
        kept = {event.index for event in events[:closed]}
        self.producers.keep_made_by(kept)
        self._keep(kept)
        self._record.complete = True
        return True

    def _may_sweep(self, events: list[Event]) -> bool:
        """Without a backward pass: at twice as many events, in an evaluation sooner."""
        return len(events) > self._sweep_at or (len(events) >= self._rests_until and is_evaluating(events))

    def _keep_roots(self, events: list[Event]) -> bool:
        """Of a finished iteration keep the calls of modules whose results are in use. False where they need others."""
        live = [event for event in events if type(event) is RootCall and has_live_result(event)]
        if self.ahead.kept or len(live) > KEPT_ROOTS or any(refs_of(root) for root in live):
            return False
        self.producers.keep_only(live)
        self._holders.clear()
        events[:] = live
        return True

    def _keep(self, kept: set[int]) -> None:
        self._record.events = [e for e in self._record.events if e.index in kept]
        self.producers.forget(kept)
        self._holders.clear()
        self._window.clear()
        found = len(self._record.events)
        self._rests_until = found + found // 4 if found > SWEEP_EVENTS else 0


def versions_in(values: Iterable[Any]) -> Sequence[int]:
    """The version of each tensor among the operands, -1 for what is none."""
    try:
        return [plain_version(value) if isinstance(value, Tensor) else -1 for value in values]
    except RuntimeError:  # inference tensors have none
        return [version_of(value) if isinstance(value, Tensor) else -1 for value in values]
