"""StepRecord: what is kept of a step so that it can be run again.

A step is a list of events in the order in which they happened: calls of root modules (`RootCall`) and operators that
ran outside every module (`GlueOp`). Tensors that an earlier event made are named by `Ref`; all others are `Held`.
"""

from __future__ import annotations

import linecache
import weakref
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import CodeType
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from ampguard.compat import version_of
from ampguard.incident import Location

MAX_PARTS = 64
"""Writes to parts of a tensor that are kept so that its value before them can be had."""


@dataclass(slots=True, unsafe_hash=True)
class Ref:
    """The `output`-th tensor that event number `event` returned. Never changed (a frozen one takes thrice as long to make)."""

    event: int
    output: int


@dataclass(slots=True)
class Held:
    """A tensor that no recorded event made, and its version counter when it was used.

    `copy` is its value at that time where the event itself was about to overwrite it.
    """

    tensor: Tensor
    version: int
    copy: Tensor | None = None
    parts: OverwrittenParts | None = None
    """Where it was written to since, in parts: what stood there."""

    @property
    def is_intact(self) -> bool:
        """Whether the value that the event saw can still be had."""
        if self.copy is not None:
            return True
        return version_of(self.tensor) == (self.version if self.parts is None else self.parts.version)

    @property
    def value(self) -> Tensor:
        if self.copy is None and self.parts is not None and self.is_intact:
            self.copy = self.parts.restored(self.tensor)
        return self.tensor if self.copy is None else self.copy

    def is_overwritten_in(self, part: Tensor, before: Tensor, version: int) -> None:
        """A view of it, which holds (or held) `before`, is written to while this is its version."""
        if self.copy is None and version == (self.version if self.parts is None else self.parts.version):
            self.parts = self.parts or OverwrittenParts(self.version)
            self.parts.add(part, before)

    def is_overwritten_again_in(self, part: Tensor, version: int) -> None:
        """The same where nobody has kept what the view held: it is still had where the view was written to before."""
        parts = self.parts
        if self.copy is None and parts is not None and version == parts.version and parts.have(part):
            parts.version += 1


@dataclass(slots=True)
class OverwrittenParts:
    """What stood in the parts of a tensor that were written to (rows of a queue), and its version after the last write."""

    version: int
    kept: list[tuple[Sequence[int], Sequence[int], int, Tensor]] = field(default_factory=list)
    """Of each part its size, its strides, its offset, and what it held."""

    def add(self, part: Tensor, before: Tensor) -> None:
        """Another part is written to. After too many the version is left behind: the value is lost."""
        if len(self.kept) < MAX_PARTS:
            self.kept.append((part.size(), part.stride(), int(part.storage_offset()), before))
            self.version += 1

    def have(self, part: Tensor) -> bool:
        """Whether this part was written to before."""
        place = (part.size(), part.stride(), int(part.storage_offset()))
        return any(kept[:3] == place for kept in self.kept)

    def restored(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor as it was."""
        copy = tensor.detach().clone()
        with torch.no_grad():
            for size, stride, offset, before in reversed(self.kept):
                copy.as_strided(size, stride, offset).copy_(before)
        return copy


@dataclass(frozen=True, slots=True)
class HeldGenerator:
    """A random generator of the script's own, as it stood when an operator drew from it."""

    device: torch.device
    state: Tensor

    def restored(self) -> torch.Generator:
        generator = torch.Generator(self.device)
        generator.set_state(self.state)
        return generator


@dataclass(slots=True, unsafe_hash=True)
class Line:
    """A line of running code, kept as cheaply as possible; `location()` looks the text up. Never changed, as `Ref`."""

    code: CodeType
    number: int
    since: int = field(default=0, compare=False)
    """As the how manieth of all it was met (see `frames.lines_met`)."""

    def location(self) -> Location:
        file, name = self.code.co_filename, self.code.co_name
        qualname = getattr(self.code, "co_qualname", name).replace("<locals>.", "")
        return Location(file, self.number, name, linecache.getline(file, self.number).strip(), qualname)


@dataclass(frozen=True, slots=True)
class RngStates:
    """Where each random stream stood. A stream that the call does not draw from is None."""

    torch_cpu: Tensor | None
    torch_cuda: tuple[tuple[int, Tensor], ...] = ()
    python: Any = None
    numpy: Any = None


def cuda_rng_states() -> tuple[tuple[int, Tensor], ...]:
    """The states of the CUDA generators in use; reading them does not wait for the device."""
    if not torch.cuda.is_initialized():
        return ()
    return tuple((i, g.get_state()) for i, g in enumerate(torch.cuda.default_generators))


def torch_rng_states() -> RngStates:
    """PyTorch's own streams as they stand now."""
    return RngStates(torch.default_generator.get_state(), cuda_rng_states())


@dataclass(frozen=True, slots=True)
class Modes:
    """The thread's modes when an event ran."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The low precision in use, or None outside autocast."""
        return next((dtype for _, enabled, dtype in self.autocast if enabled), None)


@dataclass(slots=True)
class SavedBuffer:
    """A buffer before a call: the tensor object that the module held, its version, and its value if calls change it."""

    owner: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None
    is_plain: bool = False
    """It is no buffer of PyTorch's, but an attribute that calls write to."""
    is_own: bool = False
    """Code of the script's own writes to it, and not PyTorch's (BatchNorm): what is not finite in it may be meant."""


ABSENT = object()
"""In place of a value: there was no such name."""


@dataclass(frozen=True, slots=True)
class SavedAttribute:
    """A name (a module's attribute, a global) that calls bind anew, and what it stood for before the call (or `ABSENT`)."""

    owner: dict[str, Any]
    name: str
    value: Any


@dataclass(slots=True)
class RootCall:
    """A call of a module while no other module was running."""

    index: int
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modes: Modes
    rng: RngStates
    training: bool
    buffers: list[SavedBuffer]
    line: Line | None
    prefix: str
    updates_before: int
    attributes: list[SavedAttribute] = field(default_factory=list)
    swapped_state: dict[str, Any] = field(default_factory=dict)
    outputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    floating: list[bool] = field(default_factory=list)
    error: BaseException | None = None
    started: float = 0.0
    seconds: float = 0.0
    is_function: bool = False
    """True for a custom `torch.autograd.Function` applied outside every module: its own backward is needed to replay it."""
    wants_gradient: bool = False
    """Whether any of what it returned wants a gradient."""
    is_rewritten: bool = False
    """Whether the swapped parameters are its own, as the script wrote them in this step; see `replay/rewritten.py`."""
    region: int = 0
    """Calls of the same number lie between the same two clearings of autocast's weight cache; -1 without that cache."""
    left: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """Where it left results that it did not return (`self.last_loss = ...`): the last of its outputs, in this order."""


@dataclass(frozen=True, slots=True)
class ModulesAround:
    """The outermost and the innermost of the modules that are running."""

    root: weakref.ref[nn.Module]
    module: weakref.ref[nn.Module]


@dataclass(slots=True)
class GlueOp:
    """An ATen operator that ran outside every module."""

    index: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: Line | None
    grad: bool
    rng: RngStates | None = None
    outputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    floating: list[bool] = field(default_factory=list)
    error: BaseException | None = None
    derivative: int | None = None
    """Of a derivative that a transform of `torch.func` takes: the number of the node that ran; -1 for a custom function's."""
    nodes: int = 0
    """The number of autograd's next node as it ran: its own have smaller ones."""
    within: ModulesAround | None = None
    """Under a transform of `torch.func`, which runs modules that are taped as they come: those that it ran in."""
    may_be_cast: bool = field(default=False, kw_only=True)
    """Whether it ran within a region of autocast, which casts what such an operator is given if it is switched on."""
    casts_for: tuple[tuple[str, torch.dtype], ...] = field(default=(), kw_only=True)
    """Of an operator whose kernel is cast in what it calls: the devices for which autocast was on, and its type there."""


@dataclass(slots=True)
class BackwardCall:
    """A call of `torch.autograd.backward` or `grad`: what was differentiated, with which factors, by what.

    `args` holds (the tensors, the gradients given for them or None, the inputs or None). `outputs` are the gradients of
    `torch.autograd.grad`; `backward` leaves its own in the parameters.
    """

    index: int
    args: tuple[Any, ...]
    line: Line | None
    create_graph: bool
    updates_before: int
    modes: Modes
    outputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    floating: list[bool] = field(default_factory=list)
    only: frozenset[int] | None = None
    """Identities of the leaves that `backward(inputs=...)` was asked for."""
    error: BaseException | None = None

    @property
    def kwargs(self) -> dict[str, Any]:
        return {}

    @property
    def grad(self) -> bool:
        return self.create_graph

    @property
    def is_functional(self) -> bool:
        """Whether it returned its gradients instead of leaving them in the parameters."""
        return self.args[2] is not None


Event: TypeAlias = RootCall | GlueOp | BackwardCall


@dataclass(slots=True)
class StepRecord:
    """The events of one step, in order. `complete` is False where some operator ran unrecorded.

    `writers` names, for an event, the later ones that wrote to its result in place, through a view. `iteration_start`
    is the first event of the iteration that was running.
    """

    events: list[Event] = field(default_factory=list)
    complete: bool = True
    writers: dict[int, list[int]] = field(default_factory=dict)
    iteration_start: int = 0

    def tensor_behind(self, operand: object) -> Tensor | None:
        """The script's tensor that an event was given, if it is still there; for its `.data`, the tensor itself."""
        if isinstance(operand, Held):
            return operand.tensor
        if not isinstance(operand, Ref):
            return None
        event = self.event(operand.event)
        if event is None or operand.output >= len(event.outputs):
            return None
        tensor = event.outputs[operand.output]()
        is_gone = tensor is None and isinstance(event, GlueOp) and event.func is torch.ops.aten.detach.default
        return self.tensor_behind(event.args[0]) if is_gone else tensor

    def event(self, index: int) -> Event | None:
        if not self.events:
            return None
        position = index - self.events[0].index
        if 0 <= position < len(self.events) and self.events[position].index == index:
            return self.events[position]
        position = bisect_left(self.events, index, key=attrgetter("index"))
        found = self.events[position] if position < len(self.events) else None
        return found if found is not None and found.index == index else None


class GraphOrigin(Protocol):
    """The replay of a CUDA graph. `line`: where its capture began. `changes_weights`: an optimizer steps in it."""

    @property
    def line(self) -> Line | None: ...
    @property
    def changes_weights(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class BadResult:
    """A result that must not be: what `investigate` starts from.

    `kind`: a loss, an output in evaluation, a buffer that a call poisoned, an operator that PyTorch refused to run, or
    gradients, judged before the optimizer uses them. For gradients, `parameters` are the tensors that they belong to;
    `loss_scale` is what the loss was multiplied by, where a scaler did (`is_held_off`: and it skipped the update). An
    `underflow` is a suspicion: gradients that are finite and may have lost a part to zero.
    """

    kind: Literal["loss", "output", "buffer", "raised", "gradient", "underflow"]
    mode: Literal["train", "eval"]
    step: int
    record: StepRecord
    targets: tuple[Ref | Held, ...]
    error: BaseException | None = None
    names: tuple[str, ...] = ()
    parameters: tuple[Tensor, ...] = ()
    loss_scale: float | None = None
    is_own_scale: bool = False
    """The script multiplies the loss by a factor of its own."""
    is_held_off: bool = False
    since: int = 0
    """The first event after these gradients were last cleared."""
    is_past_scaler: bool = False
    """The loss was scaled, and an optimizer is about to use the gradients without asking the scaler."""
    is_replaced: bool = False
    """The script has put finite gradients in their place, before the scaler looks at them or the optimizer uses them."""
    is_passed_over: bool = False
    """The script gives the step up by itself: the scaler is not asked, and does not lower the scale."""
    is_suspected: bool = False
    """That it has is only supposed: told if a replay shows it."""
    is_late: bool = False
    """The optimizer had used them when the device that holds them came to them: their step is over."""
    is_of_weights: bool = False
    """What the script wrote to weights between two steps, in place of a loss."""
    is_of_state: bool = False
    """State that the script keeps outside of modules, in place of a loss: a failure if a later step reads it."""
    is_of_preparation: bool = False
    """What the script computed before its first step, in place of a loss."""
    has_ended_run: bool = False
    """The script has raised an error over them."""
    weights: tuple[tuple[Tensor, Tensor], ...] = ()
    """Parameters that were updated since, and what they were then."""
    may_be_meant: Literal["", "array", "errors", "count", "again"] = ""
    """A figure of an evaluation that scripts know how to handle: NaN in an array (`nanmean`), of counts (a precision) or
    given to a metric that passes over NaN. `errors`: an array in which no number is finite, which is meant only where it
    holds the errors for targets that are not known. `again`: what the script has asked about, and computed anew from the same
    tensors, and that was finite."""
    graph: GraphOrigin | None = None
    """The CUDA graph in whose replay it was computed; the record, if any, is of a pass like it."""

    @property
    def is_of_gradients(self) -> bool:
        return self.kind in ("gradient", "underflow")


def module_within(event: Event | None) -> nn.Module | None:
    """The module in which a transform of `torch.func` ran an operator that is recorded by itself."""
    return event.within.module() if type(event) is GlueOp and event.within is not None else None


def root_around(event: Event) -> nn.Module | None:
    """The outermost module around that operator."""
    return event.within.root() if type(event) is GlueOp and event.within is not None else None


def since(events: Sequence[Event], index: int) -> list[Event]:
    """The events from `index` on. They are few at the end of many, mostly."""
    first = len(events)
    while first and events[first - 1].index >= index:
        first -= 1
    return list(events[first:])
