"""Writes the operators of a replay into a Trace: operands and who made them, results and where they are not finite."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.replay.operators import OperatorFacts, flat_scalars, flat_tensors, operand_names, without_tensors
from ampguard.replay.trace import Trace, TracedOp, TracedTensor, bad_elements, traced

KEPT_OPS = 96
"""Operators with a non-finite result whose operands' values are kept."""

KEPT_BYTES = 1 << 29

LIFTS = frozenset({"lift_fresh", "lift_fresh_copy"})
"""Operators by which PyTorch takes in a tensor that was made outside of it."""

MAX_LEVELS = 8
"""Transforms of `torch.func` within each other."""


class TraceWriter:
    """What must be remembered from one operator to the next."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._made_by: dict[int, tuple[weakref.ref[Tensor], tuple[int, int]]] = {}
        self._occurrences: dict[tuple[Any, ...], int] = {}
        self._kept_ops = 0
        self._kept_bytes = 0
        self._nodes: dict[int, int] = {}
        """For a node of the graph, by number: the operator that made it."""
        self._inner_nodes: dict[int, int] = {}
        """The same for the nodes of an operator under a transform of `torch.func`, all but the last of them."""
        self._last_node = -1
        self._through_views: list[tuple[int, Tensor]] = []
        """Operators that wrote to a view, and its base: autograd is about to give that a node of its own (`CopySlices`)."""

    def begin(self, op: TracedOp, facts: OperatorFacts, args: Any, kwargs: Any) -> None:
        """An operator is about to run: its operands, and the key under which another replay of the step finds it."""
        self._note_copied_slices()
        for tensor in flat_tensors(args, kwargs):
            op.inputs.append(traced(tensor, self._maker(tensor)))
        op.scalars = flat_scalars(args, kwargs)
        if not facts.is_cast:
            key = (op.event, op.module, facts.name, op.line.number if op.line else None)
            occurrence = self._occurrences.get(key, 0)
            self._occurrences[key] = occurrence + 1
            op.key = (*key, occurrence)
        self.trace.ops.append(op)

    def note_around(self, op: TracedOp, operands: list[Tensor], given: list[Tensor]) -> None:
        """Memory is asked for, with these operands, in a module that was given these tensors."""
        for operand, tensor in zip(op.inputs, operands, strict=False):
            operand.bad = bad_elements(tensor)
        op.around = list(op.inputs)
        for tensor in given:
            if not any(tensor is operand for operand in operands):
                beside = traced(tensor, self._maker(tensor))
                beside.bad = bad_elements(tensor)
                op.around.append(beside)

    def stands_for(self, tensor: Tensor, made: Tensor) -> None:
        """What made `made` has made `tensor`."""
        maker = self._maker(made)
        if maker is not None:
            self._made_by[id(tensor)] = (weakref.ref(tensor), maker)

    def end(self, op: TracedOp, facts: OperatorFacts, args: Any, written: Any, kwargs: Any, output: Any) -> None:
        """It has run: its results, where they are bad, and what it wrote to."""
        if (
            torch.is_grad_enabled() or not op.in_backward
        ):  # else it has no node, and a device's thread has numbers of its own
            self._note_node(op)
        results = output if isinstance(output, (tuple, list)) else (output,)
        shared = () if facts.writes else [operand.storage for operand in op.inputs]
        for position, tensor in enumerate(results):
            if not isinstance(tensor, Tensor):
                op.outputs.append(TracedTensor((), torch.int64, 0))
                continue
            result = traced(tensor, (op.index, position))
            op.outputs.append(result)
            self._made_by[id(tensor)] = (weakref.ref(tensor), (op.index, position))
            if facts.is_view(position):
                continue  # nothing was written
            if result.storage in shared:
                continue  # a view that does not say so (`_unsafe_view`)
            if not facts.is_uninitialised:
                result.bad = bad_elements(tensor)
            if result.bad is not None or not facts.writes:
                self.trace.note_write(result.storage, op.index, position, is_new=not facts.writes)
        if facts.writes and not results:
            self._note_written(op, flat_tensors(written, {}))
        if facts.writes and torch.is_grad_enabled():
            bases = (compat.base_of(t) for i in facts.writes[:1] for t in flat_tensors(written[i : i + 1], {}))
            self._through_views += [(op.index, base) for base in bases if base is not None]
        if facts.hidden_writes:
            hidden = [written[i] for i in facts.hidden_writes if i < len(written) and isinstance(written[i], Tensor)]
            self._note_written(op, hidden)
        if op.is_bad:
            self._keep_operands(op, args, kwargs)
            op.taken = _taken(op, args)

    def has_seen_within(self, op: TracedOp, output: Any) -> bool:
        """Whether operators that ran within `op` have made what it returned, of numbers that it was given, or finite ones."""
        results = [tensor for tensor in flat_tensors((output,), {}) if tensor.is_floating_point()]
        given = {operand.storage for operand in op.inputs}
        for within in self.trace.ops[op.index + 1 :]:
            for operand in within.inputs:
                is_lifted = within.short_name in LIFTS and math.prod(operand.shape) > 1  # from NumPy, say
                is_others = operand.made_by is None and operand.storage not in given
                if is_others and (is_lifted or operand.bad is not None):
                    return False
        return all(maker is not None and maker[0] > op.index for maker in map(self._maker, results))

    def _note_node(self, op: TracedOp) -> None:
        """The node that the operator has made; without gradients too: in a custom function."""
        node = compat.next_node_number() - 1
        self._nodes.setdefault(node, op.index)
        if self._last_node < node - 1:  # each level of a transform gives an operator a node
            first = max(self._last_node + 1, node - MAX_LEVELS)
            self._inner_nodes |= {number: op.index for number in range(first, node) if number not in self._nodes}
        self._last_node = node

    def _note_copied_slices(self) -> None:
        while self._through_views:
            index, base = self._through_views.pop()
            node = base.grad_fn
            number = compat.node_number(node) if node is not None else None
            if node is not None and number is not None and node.name().endswith("CopySlices"):
                self._nodes.setdefault(number, index)

    def _note_written(self, op: TracedOp, tensors: list[Tensor]) -> None:
        """What an operator wrote without returning it (`_foreach_*_`, BatchNorm's running statistics)."""
        for tensor in tensors:
            result = traced(tensor, (op.index, len(op.outputs)))
            result.bad = bad_elements(tensor)
            op.outputs.append(result)
            if result.bad is not None:
                self.trace.note_write(result.storage, op.index, len(op.outputs) - 1, is_new=False)

    def _keep_operands(self, op: TracedOp, args: Any, kwargs: Any) -> None:
        """For an operator with a bad result: where its operands are bad, its plain arguments, and (for some) values."""
        op.plain = tuple(without_tensors(a) for a in args)
        op.plain_kwargs = {k: without_tensors(v) for k, v in kwargs.items()}
        op.operand_names = operand_names(op.func, args, kwargs)
        tensors = flat_tensors(args, kwargs)
        for operand, tensor in zip(op.inputs, tensors, strict=False):
            operand.bad = bad_elements(tensor, operand.laid_out)
            operand.live = weakref.ref(tensor)
        size = sum(t.numel() * t.element_size() for t in tensors)
        if self._kept_ops < KEPT_OPS and self._kept_bytes + size <= KEPT_BYTES:
            self._kept_ops += 1
            self._kept_bytes += size
            op.args, op.kwargs = args, kwargs
            op.versions = [(tensor, compat.version_of(tensor)) for tensor in tensors]

    def named(self, tensor: Tensor) -> tuple[Any, int]:
        """Which operator has made a tensor, and as which of its results; the memory of one that was given."""
        return self._maker(tensor) or ("given", compat.storage_key(tensor))

    def _maker(self, tensor: Tensor) -> tuple[int, int] | None:
        known = self._made_by.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def differentiated(self) -> TracedOp | None:
        """Inside a backward pass: the operator whose derivative is being computed."""
        self._note_copied_slices()
        node = compat.running_node_number()
        index = self._nodes.get(node) if node is not None else None
        if index is None and node is not None and not compat.is_custom_derivative():
            index = self._inner_nodes.get(node)
        if index is None or index >= len(self.trace.ops):
            return None  # (autograd numbers the nodes of each thread by themselves)
        return self.trace.ops[index]


def _taken(op: TracedOp, args: Any) -> Tensor | None:
    """From which of its two operands `torch.where` took the bad elements of its result."""
    bad = op.outputs[0].bad
    if op.name != "aten.where.self" or bad is None:
        return None
    condition: Tensor = args[0].detach().broadcast_to(op.outputs[0].shape).reshape(-1)
    return condition[bad.flat.to(condition.device)].bool().to(bad.flat.device)
