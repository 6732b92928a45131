"""Trace: the operators of a replayed step, and where their non-finite values lie.

Only operators with a non-finite result keep values. Elements are named by their offset in the memory behind the
tensor, so that a view, an in-place operator and a read through another view all speak of the same element.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampguard import compat, numerics
from ampguard.capture.record import Line
from ampguard.replay.module_calls import ModuleCall
from ampguard.replay.operators import facts_of

MAX_ELEMENTS = 1 << 16
"""Non-finite elements kept of one tensor."""

BLOCK = 4 * MAX_ELEMENTS

MAX_VIEWS = 16
"""Views of views that are looked through."""


Layout = tuple[tuple[int, ...], int]
"""Strides and storage offset."""


@dataclass(slots=True)
class BadElements:
    """The non-finite elements of one tensor: flat positions, storage offsets and kinds, in the same order.

    Of a complex tensor each bad part is an entry of its own, and offsets count real numbers: `view_as_real` and `.imag`
    speak of the same places.
    """

    flat: Tensor
    offsets: Tensor
    kinds: Tensor
    count: int

    @property
    def is_complete(self) -> bool:
        return self.count == self.flat.numel()

    def position_of(self, offset: int) -> int | None:
        """The flat position of the element at a storage offset, or None where it is finite (or was not kept)."""
        hits = (self.offsets == offset).nonzero()
        return int(self.flat[hits[0, 0]]) if hits.numel() else None


@dataclass(slots=True)
class TracedTensor:
    """A tensor that took part in an operator: shape and type, never its values.

    `laid_out`: its strides and its offset in the storage, kept where the operator was about to overwrite it. `is_dense`:
    else the shape is that of the values that it stores.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    made_by: tuple[int, int] | None = None
    bad: BadElements | None = None
    live: weakref.ref[Tensor] | None = None
    laid_out: Layout | None = None
    is_dense: bool = True
    device: str = "cpu"


@dataclass(slots=True)
class TracedOp:
    """One operator of the replay.

    `short_name`: "bmm", "add" (also for `add_`): what is computed, not how it is stored. `plain` and `plain_kwargs` are
    its arguments without tensors (None in their place), and `operand_names` what the schema calls each operand, kept
    where the result is not finite; `args` and `kwargs` hold the operands' values, for the first such operators.
    """

    index: int
    event: int
    func: Any
    short_name: str
    module: str | None
    root: int | None
    line: Line | None
    owner: int | None = None
    within: str | None = None
    """Of what is recorded as outside every module: the module in which a transform of `torch.func` ran it."""
    inputs: list[TracedTensor] = field(default_factory=list)
    outputs: list[TracedTensor] = field(default_factory=list)
    scalars: list[float] = field(default_factory=list)
    plain: tuple[Any, ...] = ()
    plain_kwargs: dict[str, Any] = field(default_factory=dict)
    operand_names: list[str] = field(default_factory=list)
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    """The tensors in these, and how often each had been written to."""
    key: tuple[Any, ...] = ()
    refused: bool = False
    taken: Tensor | None = None
    """Of `torch.where`: for each bad element of its result, whether it was taken from the first of the two."""
    in_backward: bool = False
    is_tangent: bool = False
    """Of what is `in_backward`: whether the derivative is taken in forward mode."""
    forward: int | None = None
    """In backward: the operator of the forward pass that is being differentiated."""
    around: list[TracedTensor] = field(default_factory=list)
    """Of memory that is asked for: what whoever fills it may read, which are the operands and what its module was given."""

    @property
    def name(self) -> str:
        return str(self.func)

    @property
    def device(self) -> str:
        """The kind of device that it computes on: numbers that lie on the CPU may go into it everywhere."""
        return next((t.device for t in (*self.inputs, *self.outputs) if t.device != "cpu"), "cpu")

    @property
    def place(self) -> tuple[str, str | None, int | None]:
        """The operator's name and the line of code that runs it."""
        if self.line is None:
            return (self.name, None, None)
        return (self.name, self.line.code.co_filename, self.line.number)

    @property
    def is_view(self) -> bool:
        """Whether the first result is another view of the first operand."""
        return facts_of(self.func).is_view(0) and bool(self.inputs)

    @property
    def is_bad(self) -> bool:
        for out in self.outputs:  # noqa: SIM110 (asked of each operator)
            if out.bad is not None:
                return True
        return False


@dataclass(slots=True)
class Trace:
    """The operators of one replay, and which of them wrote where.

    `writes` lists, for a storage, (operator, which result, whether the operator allocated it): a storage's identity
    comes back once the memory is freed, so what lies before an allocation belonged to another tensor.
    """

    ops: list[TracedOp] = field(default_factory=list)
    writes: dict[int, list[tuple[int, int, bool]]] = field(default_factory=dict)
    older: dict[tuple[int, int, int], Tensor | None] = field(default_factory=dict)
    """By (what an operand's bad elements are, its maker, which result): which of them were bad before that operator."""
    beginnings: list[tuple[int, int, Tensor]] | None = None
    """The operators at which bad values began first, in how many samples there, and in which of them; None: not asked for yet."""
    calls: dict[int, list[ModuleCall]] = field(default_factory=dict)
    """By the identity of a module: its calls, of each place one."""

    def forget_overwritten(self) -> None:
        """Operands that the step has written to behind their operator are not what it was given: they can be captured."""
        for op in self.ops:
            if any(compat.version_of(tensor) != version for tensor, version in op.versions):
                op.args = op.kwargs = None
            op.versions = []

    def note_write(self, storage: int, op: int, result: int, is_new: bool) -> None:
        self.writes.setdefault(storage, []).append((op, result, is_new))

    def writer_of(self, storage: int, offset: int | None, before: int) -> tuple[TracedOp, int, int | None] | None:
        """The last operator before `before` that left a non-finite value at this place in memory.

        Returns the operator, which of its results, and the flat position there (None where it is not known).
        """
        for index, output, is_new in reversed(self.writes.get(storage, ())):
            if index >= before:
                continue
            bad = self.ops[index].outputs[output].bad
            if bad is not None:
                position = bad.position_of(offset) if offset is not None else None
                if position is not None or offset is None or not bad.is_complete:
                    return self.ops[index], output, position
            if is_new:
                return None
        return None

    def memory_of(self, tensor: TracedTensor) -> tuple[TracedOp, int] | None:
        """The operator (and which of its results) that has made the memory of a tensor, or written to it last, and left it
        finite; None where that is not known. What is not finite in there now was written by something that is no operator.
        """
        made = tensor.made_by
        for _ in range(MAX_VIEWS):
            if made is None:
                return None
            op = self.ops[made[0]]
            result = op.outputs[made[1]]
            if result.storage != tensor.storage or result.bad is not None:
                return None
            if not op.is_view:
                return op, made[1]
            made = op.inputs[0].made_by
        return None

    def run_key(self, index: int) -> tuple[int, str, int]:
        """By which a variant names one run of an operator: other replays of the step may have more operators."""
        op = self.ops[index]
        same = sum(other.event == op.event and other.name == op.name for other in self.ops[:index])
        return op.event, op.name, same

    def aligned(self, op: TracedOp) -> TracedOp | None:
        """The same operator in this trace of a changed replay (which may have more or fewer casts)."""
        return next((other for other in self.ops if other.key == op.key), None)


def bad_elements(tensor: Tensor, laid_out: Layout | None = None) -> BadElements | None:
    """Where `tensor` (what lies here of one that is spread over ranks) is not finite, or None. Waits for the device.

    `laid_out`: how the tensor lay in memory of which `tensor` is a copy. Offsets are in that memory.
    """
    tensor = compat.elements_here(tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if not compat.has_values(tensor):
        return None
    parts = 2 if tensor.is_complex() else 1
    values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    if numerics.has_finite_sum(values):
        return None
    codes = numerics.kinds(values).reshape(-1)
    count = int(torch.count_nonzero(codes))
    if not count:  # the sum alone was too large
        return None
    places = _first_bad(codes, count)
    flat = places // parts if parts > 1 else places
    offsets = storage_offsets(tensor.shape, laid_out or layout_of(tensor), flat)
    if parts > 1:
        offsets = offsets * parts + places % parts
    return BadElements(flat.cpu(), offsets.cpu(), codes[places].cpu(), count)


def _first_bad(codes: Tensor, count: int) -> Tensor:
    """Where the first of the `count` bad elements lie, as many as are kept; of a large tensor, no more of it is looked at."""
    found: list[Tensor] = []
    left, at = min(count, MAX_ELEMENTS), 0
    while left > 0:
        block = codes[at : at + BLOCK].nonzero().reshape(-1)[:left]
        found.append(block + at)
        left -= block.numel()
        at += BLOCK
    return torch.cat(found) if len(found) > 1 else found[0]


def identical(old: Tensor, new: Tensor) -> bool:
    """Bitwise equal, a NaN like any other NaN. Tensors of another shape, type or device than before were changed on purpose."""
    if not (compat.is_dense(old) and compat.is_dense(new)) or not is_like(old, new):
        return True
    old, new = old.detach(), new.detach()
    return bool(((old == new) | ((old != old) & (new != new))).all())


def is_like(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may hold the same: those of one shape and type on one device."""
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def layout_of(tensor: Tensor) -> Layout:
    """The layout of what lies here of a tensor, or of the values that a sparse or nested one stores."""
    tensor = compat.elements_here(tensor)
    return tuple(tensor.stride()), int(tensor.storage_offset())


def storage_offsets(shape: tuple[int, ...], laid_out: Layout, flat: Tensor) -> Tensor:
    """Offsets in the storage of the elements at the flat positions of a tensor."""
    strides, start = laid_out
    if _is_contiguous(shape, strides):
        return flat + start
    offsets = torch.full_like(flat, start)
    rest = flat
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        offsets = offsets + (rest % size) * stride
        rest = rest // size
    return offsets


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def asked_dtype(op: TracedOp) -> torch.dtype | None:
    """The type that an operator was asked for, of those whose arguments are kept: one that has no operands has only this."""
    dtype = (op.kwargs or {}).get("dtype")
    return dtype if isinstance(dtype, torch.dtype) else None


def traced(tensor: Tensor, made_by: tuple[int, int] | None = None) -> TracedTensor:
    is_dense = compat.is_dense(tensor)
    if not is_dense:
        tensor = compat.stored_values(tensor)
    return TracedTensor(
        tensor.shape, tensor.dtype, compat.storage_key(tensor), made_by, is_dense=is_dense, device=tensor.device.type
    )
