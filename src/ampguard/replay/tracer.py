"""The operator tracer: sees every operator of a replay, may change its precision or its operands, and has it written down.

Operators are numbered as they come. The same step replayed again runs the same operators under the same numbers, so
"operator 812 with its operand clamped" names one place exactly.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat, numerics
from ampguard.capture.compiled.functions import CompiledFunction
from ampguard.capture.frames import user_line
from ampguard.capture.record import BackwardCall, Event, GlueOp, Line, RootCall, module_within
from ampguard.capture.root_calls.surroundings import devices_in_use, is_autocast_on
from ampguard.capture.root_calls.trees import map_tensors
from ampguard.replay.changed_nodes import ChangedNodes
from ampguard.replay.forward_mode import ChangedOperands, TracedTangents
from ampguard.replay.module_calls import note_call
from ampguard.replay.operators import OperatorFacts, facts_of, flat_tensors
from ampguard.replay.trace import Trace, TracedOp, identical, is_like, layout_of
from ampguard.replay.transformed import TransformedNodes
from ampguard.replay.variants import Captured, CodePlace, Intervention, RunKey, Variant, converted, widened
from ampguard.replay.writer import TraceWriter


@dataclass(frozen=True, slots=True)
class Noted:
    """An operator between its start and its end."""

    index: int
    func: Any
    facts: OperatorFacts
    traced: TracedOp | None
    before: tuple[Any, ...] | None

    @property
    def op(self) -> TracedOp:
        assert self.traced is not None
        return self.traced


class CollectiveError(RuntimeError):
    """A replay of one rank must not talk to the others."""


class ReplayMode(compat.DispatchMode):
    """The dispatch mode of one replay."""

    sees_operators = True

    def __init__(self, variant: Variant, trace: Trace | None, names: dict[int, str]) -> None:
        super().__init__()
        self.variant = variant
        self.writer = TraceWriter(trace) if trace is not None else None
        self._notes = trace is not None or bool(variant.capture)
        """Whether anything is kept of the operators that run."""
        self.retains_graph = True
        self.event: Event | None = None
        self.count = 0
        self._captured: dict[int, tuple[Captured, dict[int, tuple[Tensor, int, Tensor]]]] = {}
        """With each tensor of it, by identity: how often that had been written to, and what it held."""
        self.stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        self.sought: list[list[Tensor]] = []
        """Values that the step read outside modules and that no recorded event made: which operator makes them?"""
        self.hidden: dict[tuple[CodePlace, int], int] = {}
        """Where such values were found to be made: the n-th run of an operator at a line, and whose value it is."""
        self.found: dict[int, Tensor] = {}
        self._matches: dict[int, list[tuple[tuple[CodePlace, int], Tensor]]] = {}
        self.zero_shares: dict[int, float] = {}
        """For operators of a backward pass, where asked for: the share of zeros in the result."""
        self._runs_of: dict[CodePlace, int] = {}
        self._runs_in_event: dict[tuple[int, str], int] = {}
        self.boundary: CodeType | None = None
        """The code of the frame that runs the replay: frames beyond it belong to the script's present, not to the step."""
        self.stack: list[nn.Module] = []
        self._arguments: list[tuple[Any, Any]] = []
        """What each of the modules that are running was called with."""
        self._names = names
        self._here: tuple[str | None, int | None] = (None, None)
        self._is_outside = False
        """Whether a compiled function is running, and none of the modules that it calls."""
        self._may_convert = bool(variant.convert or variant.force_fp32 or variant.fp32_lines)
        self._intervenes = bool(variant.interventions or variant.at_places)
        self._changed_runs = frozenset(name for _, name, _ in variant.interventions)
        self._changed_at_places = frozenset(name for name, _, _ in variant.at_places)
        """Names of the operators that are changed, by their run and by their place."""
        self._forced = 0
        self._in_kernels = 0
        """How many of the script's own operators are running, one within another."""
        self.own_casts: dict[tuple[int, int], Line] = {}
        """Lines that cast to low precision outside autocast, within modules that are computed in float32."""
        self.changed_nodes = ChangedNodes()
        self.transformed = TransformedNodes()
        self.tangents = TracedTangents()
        self.changed_operands = ChangedOperands()

    @contextlib.contextmanager
    def differentiating(self, boundary: CodeType) -> Iterator[None]:
        """A backward pass runs; frames beyond that of `boundary` are not the step's."""
        before, self.boundary = self.boundary, boundary
        self.changed_nodes.settle()
        try:
            with self:
                yield
        finally:
            self.boundary = before

    def stands_for(self, tensor: Tensor, made: Tensor) -> None:
        """`tensor` is handed to an operator in the place of `made`, which an operator of the replay has returned."""
        if self.writer is not None:
            self.writer.stands_for(tensor, made)

    def renamed(self, before: Tensor, after: Tensor) -> None:
        """A result of an operator goes on under another class of tensors."""
        self.stands_for(after, before)

    def met_tangent(self, tangent: Tensor, is_made: bool) -> None:
        """A module makes a dual number of this tangent, or takes it out of one."""
        if self.writer is not None:
            self.tangents.note(self.count, self.writer.named(tangent), is_made)

    # --- modules ----------------------------------------------------------------------------------------------------

    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module's call under its name; in float32, outside autocast, where the variant says so."""
        self.enter_module(module)
        self._arguments.append((args, kwargs))
        try:
            if self.writer is not None and not self._forced:
                of_root = self.event.line if isinstance(self.event, RootCall) else None
                note_call(self.writer.trace.calls, module, args, kwargs, sys._getframe(1), self.boundary, of_root)
            if id(module) in self.variant.force_fp32 and not self._forced:
                return self._call_in_float32(original, module, args, kwargs)
            return original(module, *args, **kwargs)
        finally:
            self._arguments.pop()
            self.leave_module()

    def enter_module(self, module: nn.Module) -> None:
        """A module begins to run."""
        self.stack.append(module)
        self._locate()

    def leave_module(self) -> None:
        """The innermost module has run."""
        self.stack.pop()
        self._locate()

    def _call_in_float32(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        devices = devices_in_use()
        before = [(d, torch.is_autocast_enabled(d)) for d in devices]
        self._forced += 1
        try:
            for device in devices:
                torch.set_autocast_enabled(device, False)
            output = original(module, *map_tensors(args, widened), **map_tensors(kwargs, widened))
        finally:
            self._forced -= 1
            for device, enabled in before:
                torch.set_autocast_enabled(device, enabled)
        low = next((t.dtype for t in flat_tensors(args, kwargs) if numerics.is_low_precision(t.dtype)), None)
        if low is None or any(enabled for _, enabled in before):
            return output  # autocast casts again where it wants to
        return map_tensors(output, lambda t: compat.in_class_of(t.to(low), t) if t.dtype == torch.float32 else t)

    def _locate(self) -> None:
        """The innermost module that is running and that the user's code names: its dotted name and its identity."""
        for module in reversed(self.stack):
            name = self._names.get(id(module))
            if name is not None:
                self._here = (name, id(module))
                self._is_outside = False
                return
        self._is_outside = bool(self.stack) and isinstance(self.stack[0], CompiledFunction)
        self._here = ("" if self.stack and not self._is_outside else None, None)

    # --- operators --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._intervenes:
            if self.changed_nodes.is_busy:
                return compat.run_counted(func, args, kwargs)
            self.changed_nodes.settle()
        facts = facts_of(func)
        if facts.is_collective and compat.several_ranks():  # (one that is alone waits for nobody)
            raise CollectiveError(f"{func} would wait for the other ranks")
        kernel = compat.python_kernel(func, args) if facts.is_foreign else None
        if kernel is not None:
            return self._run_kernel(kernel, func, args, kwargs)
        precision = self._precision() if self._may_convert else None
        if precision is not None:
            if self._forced and numerics.is_low_precision(kwargs.get("dtype")):
                self._note_own_cast(sys._getframe())
            args, kwargs = converted(func, args, kwargs, precision)
        key: RunKey | None = None
        if self._intervenes and self.changed_operands.differentiated:
            key = self.changed_operands.key(self.event.index if self.event is not None else -1, func)
        noted = self.note_before(func, args, kwargs) if self._notes else None
        if noted is None:
            self._number()
        intervention = None
        if self._intervenes:
            intervention = self._intervention(facts.full_name)
            if key is not None:
                intervention = self.changed_operands.changing(key, args, kwargs, intervention)
        try:
            if intervention is None:
                output = compat.run_counted(func, args, kwargs, casts=precision is None)
            else:
                output = self._intervened(
                    intervention, self.changed_operands.noting(key, func, args, kwargs), args, kwargs
                )
        except RuntimeError:
            if noted is not None and noted.traced is not None:
                noted.op.refused = True
                noted.op.args, noted.op.kwargs = args, kwargs
            raise
        if noted is not None:
            self.note_after(noted, args, kwargs, output)
        elif self.sought or self.hidden:
            self._seek(func, output)
        return output

    def _number(self) -> int:
        """The number of the operator that is about to run."""
        index = self.count
        self.count += 1
        self.transformed.note(self.event, index)
        return index

    def _run_kernel(self, kernel: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that is written in Python: what it computes with is seen, as in a custom function.

        It counts as one operator where it computes outside PyTorch (NumPy).
        """
        noted = self.note_before(func, args, kwargs)
        self._in_kernels += 1
        try:
            with compat.below_autograd(), compat.casting_within(), self:
                output = kernel(*args, **kwargs)
        finally:
            self._in_kernels -= 1
        if noted.traced is None or self.writer is None or not self.writer.has_seen_within(noted.traced, output):
            self.note_after(noted, args, kwargs, output)
        return output

    def _intervened(self, intervention: Intervention, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the intervention; its derivative takes the place of the operator's."""
        if not self.changed_nodes.is_needed(args, kwargs):
            return intervention(func, args, kwargs)
        changed = self.changed_nodes.before(intervention, func, args, kwargs)
        output = intervention(func, args, kwargs)
        self.changed_nodes.after(changed, output)
        return output

    def note_before(self, func: Any, args: Any, kwargs: Any) -> Noted:
        """What must be kept of an operator that is about to run."""
        facts = facts_of(func)
        index = self._number()
        op = None
        if self.writer is not None:
            op = self._traced(self.writer, index, func, facts, sys._getframe())
            self.writer.begin(op, facts, args, kwargs)
            if facts.allocates:
                self.writer.note_around(op, flat_tensors(args, kwargs), self._given())
        before = None
        if (op is not None or index in self.variant.capture) and (facts.writes or facts.hidden_writes):
            before = values_before(args, facts.writes or facts.hidden_writes)
            for operand, tensor in zip(op.inputs, flat_tensors(args, kwargs), strict=True) if op is not None else ():
                operand.laid_out = layout_of(tensor)  # the copies made of it lie elsewhere
        return Noted(index, func, facts, op, before)

    def _given(self) -> list[Tensor]:
        """The plain tensors that the innermost module was called with, those left out that a transform has wrapped."""
        given = flat_tensors(*self._arguments[-1]) if self._arguments else []
        return [t for t in given if type(t) in (Tensor, nn.Parameter) and not compat.is_of_transform(t)]

    def note_after(self, noted: Noted, args: Any, kwargs: Any, output: Any) -> None:
        """An operator has run."""
        operands = args if noted.before is None else noted.before
        if noted.index in self.variant.capture:
            captured = Captured(noted.func, operands, kwargs, output)
            self._captured[noted.index] = (
                captured,
                {
                    id(tensor): (tensor, compat.version_of(tensor), tensor.detach().clone())
                    for tensor in (*captured.tensors, *flat_tensors((output,), {}))
                    if compat.is_dense(tensor) and compat.has_values(tensor)
                },
            )
        if self.sought or self.hidden:
            self._seek(noted.func, output)
        if noted.traced is not None and self.writer is not None:
            self.writer.end(noted.traced, noted.facts, operands, args, kwargs, output)
            if self.variant.zero_shares and noted.traced.in_backward:
                first = output[0] if isinstance(output, (tuple, list)) and output else output
                if isinstance(first, Tensor) and first.is_floating_point() and first.numel():
                    self.zero_shares[noted.index] = float((first == 0).float().mean())

    def captured(self) -> dict[int, Captured]:
        """The operators that were asked for, by their number, with the values that they met."""
        return {index: captured.as_it_was(copies) for index, (captured, copies) in self._captured.items()}

    def _seek(self, func: Any, output: Any) -> None:
        """Is this result one that the step later read without a module having returned it?"""
        line = self._line(sys._getframe())
        place = (str(func), line.code.co_filename, line.number) if line is not None else (str(func), None, None)
        run = self._runs_of[place] = self._runs_of.get(place, 0) + 1
        known = self.hidden.get((place, run))
        if known is not None and isinstance(output, Tensor):
            self.found[known] = output
        in_module = isinstance(self.event, RootCall) and isinstance(output, Tensor) and compat.has_values(output)
        for group in self.sought if in_module else ():
            value = group[0]
            alike = is_like(output, value) and may_have_made(func, value)
            if alike and identical(value, output):
                self._found_one_of(group, (place, run), output)

    def _found_one_of(self, group: list[Tensor], key: tuple[CodePlace, int], output: Tensor) -> None:
        """Values that are the same bit by bit (the NaN of two layers) were made in the order of the results."""
        matches = self._matches.setdefault(id(group[0]), [])
        matches.append((key, output))
        del matches[: -len(group)]
        ids = {id(value) for value in group}
        self.hidden = {k: v for k, v in self.hidden.items() if v not in ids}
        for value, (place_and_run, result) in zip(group, matches, strict=False):
            self.found[id(value)] = result
            self.hidden[place_and_run] = id(value)

    def _precision(self) -> torch.dtype | None:
        """The type to compute this operator in, or None for the type it has."""
        if self.variant.convert is not None:
            return self.variant.convert
        if self._forced:
            return None if self.variant.keeps_own_casts else torch.float32
        event = self.event
        is_glue = isinstance(event, GlueOp) or self._is_outside
        line = self._line(sys._getframe()) if is_glue and self.variant.fp32_lines else None
        in_region = line is not None and (line.code.co_filename, line.number) in self.variant.fp32_lines
        return torch.float32 if in_region else None

    @property
    def is_as_it_ran(self) -> bool:
        """Whether the variant changes no operator."""
        return not (self._may_convert or self._intervenes)

    def computes_in_other(self, op: GlueOp) -> bool:
        """Whether the variant itself says in which type this operator outside modules computes."""
        if self.variant.convert is not None:
            return True
        line = op.line
        return line is not None and (line.code.co_filename, line.number) in self.variant.fp32_lines

    def _note_own_cast(self, frame: FrameType) -> None:
        line = self._line(frame) if not is_autocast_on() else None
        if line is not None:
            self.own_casts[id(line.code), line.number] = line

    def _line(self, frame: FrameType) -> Line | None:
        """The user's line of the operator that is running; PyTorch's own modules have none but that of their call."""
        event = self.event
        if isinstance(event, (RootCall, BackwardCall)) or (event is not None and self._in_kernels):
            return user_line(frame, stop=self.boundary) or event.line
        return event.line if event is not None else None

    def _intervention(self, name: str) -> Intervention | None:
        by_run = self._intervention_at_run(name) if name in self._changed_runs else None
        if by_run is not None or name not in self._changed_at_places:
            return by_run
        frame = sys._getframe()
        is_derivative = isinstance(self.event, BackwardCall)  # (of another operator, often by one of the same name)
        line = user_line(frame, stop=self.boundary) if is_derivative else self._line(frame)
        if line is None and is_derivative:
            return None
        place = (name, line.code.co_filename, line.number) if line is not None else (name, None, None)
        return self.variant.at_places.get(place)

    def _intervention_at_run(self, name: str) -> Intervention | None:
        event = self.event.index if self.event is not None else -1
        run = self._runs_in_event.get((event, name), 0)
        self._runs_in_event[event, name] = run + 1
        return self.variant.interventions.get((event, name, run))

    def _traced(self, writer: TraceWriter, index: int, func: Any, facts: OperatorFacts, frame: FrameType) -> TracedOp:
        """An operator that is about to run, and where it does.

        `frame` is the guard's own: on a thread of the device, which runs derivatives there, none need be above it.
        """
        event = self.event
        if isinstance(event, BackwardCall):
            return self._derivative(writer, index, event, func, facts, frame)
        number = event.index if event is not None else -1
        in_root = isinstance(event, RootCall) and not event.is_function and not self._is_outside
        if isinstance(event, RootCall) and writer.differentiated() is not None:  # in its own forward pass
            return self._derivative(writer, index, event, func, facts, frame)
        module, owner = self._here if in_root else (None, None)
        root = number if in_root else None
        op = TracedOp(index, number, func, facts.name, module, root, self._line(frame), owner)
        op.within = self._names.get(id(module_within(event)))
        return self.transformed.told(event, op, writer.trace)

    def _derivative(
        self,
        writer: TraceWriter,
        index: int,
        event: BackwardCall | RootCall,
        func: Any,
        facts: OperatorFacts,
        frame: FrameType,
    ) -> TracedOp:
        """An operator of a backward pass: it is where the operator is whose derivative it computes.

        A line of the user's own on the stack counts more: that of a custom function's `backward`, or of the forward
        pass that checkpointing runs again. Of a derivative that a module takes in its forward pass, the lines that asked
        for it do not.
        """
        forward = writer.differentiated()
        in_forward = isinstance(event, RootCall)
        # A backward pass within a hand-written one: what it differentiates was computed there, a moment before.
        is_nested = forward is not None and forward.in_backward and forward.event == event.index
        stop = (
            compat.engine_call() if in_forward or (is_nested and not compat.is_custom_derivative()) else self.boundary
        )
        own_line = user_line(frame, stop=stop)
        if forward is None:
            module, owner = self._here if self.stack else (None, None)
            return TracedOp(
                index, event.index, func, facts.name, module, None, own_line or event.line, owner, in_backward=True
            )
        is_here = bool(self.stack) and (own_line is not None or not in_forward)
        module, owner = self._here if is_here else (forward.module, forward.owner)
        line = own_line or forward.line
        root = forward.root if module is not None else None  # (what we make of a call's own input is in no module)
        op = TracedOp(index, event.index, func, facts.name, module, root, line, owner, forward.within, in_backward=True)
        if own_line is None or not compat.is_custom_derivative():
            op.forward = forward.index
        return op


class Unwatching(ReplayMode):
    """In place of a mode where compiled code runs: it would see neither the operators nor the modules in there."""

    sees_operators = False

    def __enter__(self) -> Unwatching:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def in_groups(values: list[Tensor]) -> list[list[Tensor]]:
    """The values in groups of which none can be told from the others, in the order in which they were made."""
    groups: list[list[Tensor]] = []
    for value in sorted({id(v): v for v in values}.values(), key=_number_of_node):
        group = next((g for g in groups if _are_alike(g[0], value)), None)
        if group is None:
            groups.append([value])
        else:
            group.append(value)
    return groups


def _number_of_node(value: Tensor) -> int:
    return compat.node_number(value.grad_fn) or 0


def _are_alike(one: Tensor, other: Tensor) -> bool:
    names = [v.grad_fn.name() if v.grad_fn is not None else None for v in (one, other)]
    return is_like(one, other) and names[0] == names[1] and identical(one, other)


def may_have_made(func: Any, value: Tensor) -> bool:
    """Whether the autograd node of `value` is that of `func` (`MeanBackward1` for `aten.mean`), as far as it has one."""
    node = value.grad_fn
    name = facts_of(func).name.replace("_", "").lower()
    return node is None or node.name().lower().startswith(name)


def values_before(args: Any, positions: tuple[int, ...]) -> tuple[Any, ...]:
    """An in-place operator's operands, those that it writes to as clones."""
    return tuple(map_tensors(a, lambda t: t.detach().clone()) if i in positions else a for i, a in enumerate(args))
