"""The event log: what is kept of the running step, and how it gets there.

Everything here runs in every healthy step, hence the plain loops. Nothing writes to a tensor of the script.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampguard import compat
from ampguard.capture.events.arguments import MAX_COPY
from ampguard.capture.events.autocasting import is_cast_by_autocast, is_in_region
from ampguard.capture.events.forgetting_log import ForgettingLog
from ampguard.capture.events.operands import leaves
from ampguard.capture.flags import is_immediate
from ampguard.capture.frames import modules_around, user_line
from ampguard.capture.glue.preprocessing import uses_computed
from ampguard.capture.glue.taped_calls import TapedCall, WritingCall
from ampguard.capture.glue.told import MAX_CALL_OPERATORS, is_plain, writes_first
from ampguard.capture.record import BackwardCall, GlueOp, Held, Line, Ref, RngStates, RootCall, since
from ampguard.capture.root_calls.surroundings import modes_of_function
from ampguard.capture.root_calls.trees import PLAIN_TYPES
from ampguard.compat import plain_version, storage_key, version_of
from ampguard.numerics import is_finite

ROOM = MAX_CALL_OPERATORS - 1
"""Indices in front of a kept call's own, for the operators that it is made of."""

MAX_BEHIND = 16
"""Calls behind a yes or no that are looked through for the number that it is about."""


class EventLog(ForgettingLog):
    """The events of the current step, and the tensors that they made."""

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
        if len(self._pending.entries) >= self.most:
            self._record.complete = False
            return
        index = self.next_index + ROOM
        self.next_index = index + 1
        self.set_aside += ROOM
        more = versions_in(kwargs.values()) if kwargs else ()
        modes = modes_of_function()
        grad = modes.grad
        call = TapedCall(
            index, func, args, kwargs, line, grad, None, outputs, floating, None, None, 0, None, (args, kwargs), modes,
            made,
        )  # fmt: skip
        self._pending.add_call(call, versions, more, output)

    def keep_write(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        versions: list[int],
        before: Tensor | None,
        line: Line | None,
        notes: bool,
    ) -> None:
        """Keep a call that has written to the first of its `args`, whose value was `before`, and done nothing else.

        `notes`: the weight is to be looked at when the next step begins.
        """
        if len(self._pending.entries) >= self.most:
            self._record.complete = False
            return
        written = args[0]
        index = self.next_index + ROOM
        self.next_index = index + 1
        self.set_aside += ROOM
        modes = modes_of_function()
        call = WritingCall(
            index, func, args, kwargs, line, modes.grad, None, [weakref.ref(written)], [written.dtype.is_floating_point],
            None, None, 0, None, (args, kwargs), modes, (versions[0] + 1,), before,
        )  # fmt: skip
        maker = self._pending.maker_of(written, versions[0])
        call.is_first = before is not None and (type(maker) is WritingCall or type(written) is Parameter)
        if notes:
            self.written.note_call(_weight_behind(written, maker), index)
        self._pending.add_call(call, versions, versions_in(kwargs.values()) if kwargs else (), written)

    def is_unread(self, tensor: Tensor, gives_memory: Callable[[Any], bool]) -> bool:
        """Whether no call that is pending can have been given this tensor: it was made after all of them, in memory of its own.

        `gives_memory`: whether that is so of what an operator returns.
        """
        entries = self._pending.entries
        ref = self.producers.of(tensor, version_of(tensor))
        if ref is not None:
            maker = self.event_at(ref.event) if ref.event > self._pending.last_call else None
            return type(maker) is GlueOp and gives_memory(maker.func)
        last = entries[-1][0] if entries else None
        if not isinstance(last, TapedCall) or len(last.outputs) != 1 or last.outputs[0]() is not tensor:
            return False
        return not any(isinstance(value, Tensor) for value in leaves(last.operands))  # `torch.empty`, say

    def value_before(self, tensor: Tensor) -> Tensor | None:
        """What a call is about to overwrite; None where an earlier one, which is pending, has written it."""
        maker = self._pending.maker_of(tensor, plain_version(tensor))
        is_written = type(maker) is WritingCall and maker.index >= self.closed_until
        return None if is_written else tensor.detach().clone()

    def is_about_finite_numbers(self, truth: Tensor) -> bool:
        """Whether a yes or no (`loss.isfinite()`) was computed just now, and no number behind it is bad. Nothing is settled."""
        stack, seen = [truth], 0
        while stack and seen < MAX_BEHIND:
            tensor = stack.pop()
            operands = self._operands_behind(tensor)
            if operands is None:
                if tensor is truth or tensor.dtype is torch.bool or self.producers.maker_of(tensor) is not None:
                    return False
                continue  # whole numbers that the script was given
            seen += 1
            for operand in operands:
                if operand is None:
                    return False
                if not operand.is_floating_point():
                    stack.append(operand)
                elif operand.numel() == 1 and not (is_immediate(operand) and is_finite(operand)):
                    return False
        return not stack

    def _operands_behind(self, tensor: Tensor) -> list[Tensor | None] | None:
        """The tensors that the call or the operator was given which has just made this one (None: it is gone); None where
        that is not known."""
        version = version_of(tensor)
        maker = self._pending.maker_of(tensor, version) if self._pending.entries else None
        if maker is not None:
            return [value for value in (*maker.args, *maker.kwargs.values()) if isinstance(value, Tensor)]
        ref = self.producers.of(tensor, version)
        made_by = self.event_at(ref.event) if ref is not None else None
        if type(made_by) is not GlueOp:  # (what a call that is pending was given has no names yet)
            return None
        given = [leaf for leaf in leaves((made_by.args, made_by.kwargs)) if isinstance(leaf, (Ref, Held))]
        return [leaf.tensor if isinstance(leaf, Held) else self._result(leaf) for leaf in given]

    def _result(self, ref: Ref) -> Tensor | None:
        event = self.event_at(ref.event)
        return event.outputs[ref.output]() if event is not None and ref.output < len(event.outputs) else None

    def keep_backward(self, call: BackwardCall) -> None:
        """Keep a call of `backward` whose arguments are the tensors themselves: they are named when they are asked for."""
        losses = call.args[0]
        alone = len(losses) == 1 and type(losses[0]) is Tensor and not losses[0].is_inference()
        self._pending.add_backward(call, (plain_version(losses[0]),) if alone else versions_in(losses))

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

    def is_one_write(self, began: int, output: Any) -> bool:
        """Whether the events from `began` on are one operator, which has written to its first operand: this `output`."""
        events = since(self.record.events, began)
        op = events[0] if len(events) == 1 else None
        return type(op) is GlueOp and writes_first(op) and len(op.outputs) == 1 and op.outputs[0]() is output

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
        if self.size >= self.most:
            self.record.complete = False
            return None
        producers, newest = self.producers.known, max(self.closed_until, self._pending.last_write)
        named: list[Any] = []
        for value in args:
            kind = type(value)
            if kind is Tensor:
                known, version = producers.get(id(value)), version_of(value)
                if known is None and not self._pending.entries:
                    named.append(Held(value, version))
                elif known is not None and known[2] == version and known[1].event >= newest and known[0]() is value:
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
            modules_around(frame) if self.runs_modules else None,
            may_be_cast=is_cast_by_autocast(func) and is_in_region(),
        )
        self.next_index = index + 1
        self.append_named(op)
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
        writes = [e for e in events if type(e) is WritingCall or compat.positions_written(e.func) == {0}]
        targets = (self.record.tensor_behind(e.args[0]) for e in writes)
        written = [tensor for tensor in targets if tensor is not None]
        if not written:
            return False
        memory = {compat.storage_key(weight) for weight in compat.all_parameters(root.module)} - {0}
        return any((t.requires_grad and t.is_leaf) or compat.storage_key(t) in memory for t in written)

    def add_results(self, op: GlueOp, output: Any, writes: bool) -> None:
        """Whatever an operator returned; with `writes`, operands that it wrote to. What is no tensor has no number: a derivative
        returns None for an operand that needs none."""
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if not isinstance(tensor, Tensor):
                continue
            if writes:
                self.producers.note_write(tensor, op)
                if self._pending.entries:
                    self._pending.forget_made(tensor)
            else:
                self.producers.define(tensor, Ref(op.index, len(op.outputs)))
            op.outputs.append(weakref.ref(tensor))
            op.floating.append(tensor.is_floating_point())

    def keep_for_readers(self, tensor: Tensor) -> None:
        """A tensor is about to be overwritten by what is not recorded: events that were given it keep its value."""
        if tensor.numel() > MAX_COPY or self.lookup(tensor) is not None:
            return
        readers = [
            held for held in self._holders.of(tensor, self.record.events) if held.copy is None and held.is_intact
        ]
        copy = tensor.detach().clone() if readers else None
        for held in readers:
            held.copy = copy if held.parts is None else held.value

    def written_by_others(self, tensor: Tensor) -> None:
        """What is not recorded has written to it, and PyTorch has not counted that as a new version."""
        if self._pending.entries:
            self.settle()
        self.producers.known.pop(id(tensor), None)

    def is_copy_of(self, tensor: Tensor, source: Tensor, frame: FrameType) -> None:
        """What is not recorded has written the value of `source` to it."""
        op = self.add_operator(torch.ops.aten.detach.default, (source,), {}, None, frame)
        if op is not None:
            self.add_results(op, tensor, writes=False)

    def copied(self, value: Any) -> Any:
        """An operand that the operator overwrites and that no event made: keep its value."""
        if not isinstance(value, Tensor) or value.numel() > MAX_COPY:
            return value
        self._keep_whole_of(value)
        if self.lookup(value) is not None:
            self._keep_under_other_names(value, None)  # a weight's `.data` was made by an event, the weight was not
            return value
        version, copy = version_of(value), value.detach().clone()
        for held in self._holders.of(value, self.record.events):  # earlier readers saw this value too
            if held.version == version and held.copy is None:
                held.copy = copy
        self._keep_under_other_names(value, copy)
        return Held(value, version, copy)

    def _keep_under_other_names(self, value: Tensor, copy: Tensor | None) -> None:
        for held in self._holders.under_other_names(value, self.record.events):
            if held.is_intact and held.parts is None:
                copy = held.copy = value.detach().clone() if copy is None else copy

    def _keep_whole_of(self, part: Tensor) -> None:
        """A view is about to be written to: events that were given the whole (a queue, a memory) can have its value still."""
        whole = compat.whole_of(part)
        if whole is None:
            return
        before: Tensor | None = None
        for held in self._holders.of(whole, self.record.events):
            if held.copy is None and held.is_intact:
                before = part.detach().clone() if before is None else before
                held.is_overwritten_in(part, before, version_of(whole))


def _weight_behind(written: Tensor, maker: TapedCall | None) -> Tensor:
    """The weight whose `.data` a tensor is; any other tensor itself."""
    base = maker.operands[0][0] if maker is not None and maker.operands[0] else None
    return base if type(base) is Parameter and storage_key(base) == storage_key(written) else written


def versions_in(values: Iterable[Any]) -> Sequence[int]:
    """The version of each tensor among the operands, -1 for what is none."""
    try:
        return [
            -1 if type(value) in PLAIN_TYPES else plain_version(value) if isinstance(value, Tensor) else -1
            for value in values
        ]
    except RuntimeError:  # inference tensors have none
        return [version_of(value) if isinstance(value, Tensor) else -1 for value in values]
