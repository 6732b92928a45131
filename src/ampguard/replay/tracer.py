"""The operator tracer: sees every operator of a replay, may change its precision or its operands, and writes a Trace.

Operators are numbered as they come. The same step replayed again runs the same operators under the same numbers, so
"operator 812 with its operand clamped" names one place exactly.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat, numerics
from ampguard.capture.frames import user_line
from ampguard.capture.record import GlueOp, Line, RootCall, map_tensors
from ampguard.replay.trace import Trace, TracedOp, TracedTensor, bad_elements, traced

Intervention = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called in place of an operator with `(func, args, kwargs)`; returns the operator's result."""

CodePlace = tuple[str, str | None, int | None]
"""An operator's name, and the file and line of the code that runs it."""

KEPT_OPS = 96
"""Operators with a non-finite result whose operands' values are kept."""

KEPT_BYTES = 1 << 29

UNINITIALISED = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "empty_quantized"}
)
RUNNING_STATISTICS = {
    name: (3, 4)
    for name in (
        "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm",
        "_batch_norm_with_update", "batch_norm",
    )
}  # fmt: skip
"""Operators that write to operands although their schema does not say so, and to which."""

CASTS = frozenset({"_to_copy", "to", "clone", "detach", "alias", "lift_fresh", "lift_fresh_copy", "contiguous"})


class CollectiveInReplay(RuntimeError):
    """A replay of one rank must not talk to the others."""


@dataclass(frozen=True)
class Variant:
    """How a replay differs from the step as it ran.

    `convert` computes everything that ran in low precision in another type. `force_fp32` names modules (by object)
    that leave autocast, `fp32_lines` lines outside every module. `interventions` replace single operators.
    `tensors` replaces held tensors (a batch, a parameter, a buffer), by identity. The operands and results of the
    operators in `capture` are kept.
    """

    convert: torch.dtype | None = None
    force_fp32: frozenset[int] = frozenset()
    fp32_lines: frozenset[tuple[str, int]] = frozenset()
    interventions: dict[int, Intervention] = field(default_factory=dict)
    at_places: dict[CodePlace, Intervention] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    capture: frozenset[int] = frozenset()

    def __hash__(self) -> int:
        return id(self)


AS_IT_RAN = Variant()


@dataclass(frozen=True, slots=True)
class Captured:
    """The operands and the result of one operator of a replay."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def tensors(self) -> list[Tensor]:
        return flat_tensors(self.args, self.kwargs)

    @property
    def result(self) -> Tensor:
        output = self.output
        return output[0] if isinstance(output, (tuple, list)) else output  # type: ignore[no-any-return]


class ReplayMode(compat.DispatchMode):
    """The dispatch mode of one replay."""

    def __init__(self, variant: Variant, trace: Trace | None, names: dict[int, str]) -> None:
        super().__init__()
        self.variant = variant
        self.trace = trace
        self.event: RootCall | GlueOp | None = None
        self.count = 0
        self.captured: dict[int, Captured] = {}
        self.stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        self.boundary: CodeType | None = None
        """The code of the frame that runs the replay: frames beyond it belong to the script's present, not to the step."""
        self.stack: list[nn.Module] = []
        self._names = names
        self._made_by: dict[int, tuple[weakref.ref[Tensor], tuple[int, int]]] = {}
        self._occurrences: Counter[tuple[Any, ...]] = Counter()
        self._kept_ops = 0
        self._kept_bytes = 0
        self._forced = 0
        self._writes_to: dict[Any, tuple[int, ...]] = {}

    # --- modules ----------------------------------------------------------------------------------------------------

    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module's call under its name; in float32, outside autocast, where the variant says so."""
        self.stack.append(module)
        try:
            if id(module) in self.variant.force_fp32 and not self._forced:
                return self._call_in_float32(original, module, args, kwargs)
            return original(module, *args, **kwargs)
        finally:
            self.stack.pop()

    def _call_in_float32(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        devices = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
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
        return map_tensors(output, lambda t: t.to(low) if t.dtype == torch.float32 else t)

    @property
    def module_name(self) -> str | None:
        """The dotted name of the innermost module that is running and that the user's code names."""
        for module in reversed(self.stack):
            name = self._names.get(id(module))
            if name is not None:
                return name
        return None if not self.stack else ""

    @property
    def module_identity(self) -> int | None:
        """`id` of the module that `module_name` names."""
        return next((id(m) for m in reversed(self.stack) if id(m) in self._names), None)

    # --- operators --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            raise CollectiveInReplay(f"{func} would wait for the other ranks")
        index = self.count
        self.count += 1
        precision = self._precision()
        if precision is not None:
            args, kwargs = converted(func, args, kwargs, precision)
        op = None
        if self.trace is not None:
            op = self._begin(index, func, args, kwargs)
            before = self._overwritten_values(func, args)
        intervention = self.variant.interventions.get(index)
        if self.variant.at_places and intervention is None:
            intervention = self._intervention_here(func)
        try:
            output = func(*args, **kwargs) if intervention is None else intervention(func, args, kwargs)
        except RuntimeError:
            if op is not None:
                op.refused = True
                op.args, op.kwargs = args, kwargs
            raise
        if index in self.variant.capture:
            kept = before if self.trace is not None and before is not None else args
            self.captured[index] = Captured(func, kept, kwargs, output)
        if op is not None:
            self._end(op, func, before if before is not None else args, args, kwargs, output)
        return output

    def _precision(self) -> torch.dtype | None:
        """The type to compute this operator in, or None for the type it has."""
        if self.variant.convert is not None:
            return self.variant.convert
        if self._forced:
            return torch.float32
        event = self.event
        if self.variant.fp32_lines and isinstance(event, GlueOp) and event.line is not None:
            if (event.line.code.co_filename, event.line.number) in self.variant.fp32_lines:
                return torch.float32
        return None

    def _line(self, frame: FrameType) -> Line | None:
        """The user's line of the operator that is running; PyTorch's own modules have none but that of their call."""
        event = self.event
        if isinstance(event, RootCall):
            return user_line(frame, stop=self.boundary) or event.line
        return event.line if event is not None else None

    def _intervention_here(self, func: Any) -> Intervention | None:
        name = str(func)
        if all(place[0] != name for place in self.variant.at_places):
            return None
        line = self._line(sys._getframe(2))
        place = (name, line.code.co_filename, line.number) if line is not None else (name, None, None)
        return self.variant.at_places.get(place)

    def _begin(self, index: int, func: Any, args: Any, kwargs: Any) -> TracedOp:
        trace = self.trace
        assert trace is not None
        event = self.event
        line = self._line(sys._getframe(2))
        module = self.module_name if isinstance(event, RootCall) else None
        op = TracedOp(
            index=index,
            event=event.index if event is not None else -1,
            func=func,
            module=module,
            root=event.index if isinstance(event, RootCall) else None,
            line=line,
            owner=self.module_identity if isinstance(event, RootCall) else None,
        )
        for tensor in flat_tensors(args, kwargs):
            op.inputs.append(traced(tensor, self._maker(tensor)))
        op.plain = tuple(without_tensors(a) for a in args)
        op.plain_kwargs = {k: without_tensors(v) for k, v in kwargs.items()}
        op.scalars = [float(a) for a in flat_scalars(args, kwargs)]
        if op.short_name not in CASTS:
            key = (op.event, module, op.short_name, line.number if line else None)
            op.key = (*key, self._occurrences[key])
            self._occurrences[key] += 1
        trace.ops.append(op)
        return op

    def _end(self, op: TracedOp, func: Any, args: Any, written: Any, kwargs: Any, output: Any) -> None:
        trace = self.trace
        assert trace is not None
        results = output if isinstance(output, (tuple, list)) else (output,)
        aliases = aliasing_results(func)
        writes = bool(self._writes(func))
        read = {operand.storage for operand in op.inputs}
        for position, tensor in enumerate(results):
            if not isinstance(tensor, Tensor):
                op.outputs.append(TracedTensor((), torch.int64, 0))
                continue
            result = traced(tensor, (op.index, position))
            op.outputs.append(result)
            self._made_by[id(tensor)] = (weakref.ref(tensor), (op.index, position))
            if (aliases and aliases[min(position, len(aliases) - 1)]) or (not writes and result.storage in read):
                continue  # a view (`_unsafe_view` does not say so): nothing was written
            if op.short_name in UNINITIALISED:
                trace.writes.pop(result.storage, None)
                continue
            result.bad = bad_elements(tensor)
            if not writes:
                trace.writes[result.storage] = []
            if result.bad is not None:
                trace.writes.setdefault(result.storage, []).append((op.index, position))
        if writes and not results:
            self._note_written(op, flat_tensors(written, {}))
        self._note_written(op, self._hidden_writes(op, written))
        if op.is_bad:
            self._keep_operands(op, args, kwargs)

    def _note_written(self, op: TracedOp, tensors: list[Tensor]) -> None:
        """What an operator wrote without returning it (`_foreach_*_`, BatchNorm's running statistics)."""
        for tensor in tensors:
            result = traced(tensor, (op.index, len(op.outputs)))
            result.bad = bad_elements(tensor)
            op.outputs.append(result)
            if result.bad is not None and self.trace is not None:
                self.trace.writes.setdefault(result.storage, []).append((op.index, len(op.outputs) - 1))

    def _keep_operands(self, op: TracedOp, args: Any, kwargs: Any) -> None:
        tensors = flat_tensors(args, kwargs)
        for operand, tensor in zip(op.inputs, tensors, strict=False):
            operand.bad = bad_elements(tensor)
        size = sum(t.numel() * t.element_size() for t in tensors)
        if self._kept_ops < KEPT_OPS and self._kept_bytes + size <= KEPT_BYTES:
            self._kept_ops += 1
            self._kept_bytes += size
            op.args, op.kwargs = args, kwargs

    def _overwritten_values(self, func: Any, args: Any) -> Any:
        """The operands of an in-place operator, from before it writes; None for others."""
        positions = self._writes(func) or RUNNING_STATISTICS.get(func._schema.name.split("::")[-1], ())
        if not positions:
            return None
        return tuple(
            map_tensors(a, lambda t: t.detach().clone()) if i in positions else a for i, a in enumerate(args)
        )

    def _writes(self, func: Any) -> tuple[int, ...]:
        known = self._writes_to.get(func)
        if known is None:
            known = self._writes_to[func] = tuple(
                i
                for i, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            )
        return known

    def _hidden_writes(self, op: TracedOp, args: Any) -> list[Tensor]:
        positions = RUNNING_STATISTICS.get(op.short_name, ())
        return [args[i] for i in positions if i < len(args) and isinstance(args[i], Tensor)]

    def _maker(self, tensor: Tensor) -> tuple[int, int] | None:
        known = self._made_by.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None


def aliasing_results(func: Any) -> list[bool]:
    """For each result of `func`, whether it is a view of an operand that was not written to."""
    return [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]


def without_tensors(value: Any) -> Any:
    """An argument with None in place of every tensor."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return [without_tensors(item) for item in value]
    return value


def flat_tensors(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensor operands of an operator, lists of tensors spread out."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def flat_scalars(args: Any, kwargs: dict[str, Any]) -> list[float]:
    """The plain numbers among an operator's arguments."""
    return [v for v in (*args, *kwargs.values()) if isinstance(v, (int, float)) and not isinstance(v, bool)]


def widened(tensor: Tensor) -> Tensor:
    """Low precision to float32; anything else as it is."""
    return tensor.float() if numerics.is_low_precision(tensor.dtype) else tensor


def converted(func: Any, args: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The operator's arguments with every low-precision type replaced by `dtype`."""

    def other(value: Any) -> Any:
        if isinstance(value, Tensor):
            low = numerics.is_low_precision(value.dtype) or (dtype == torch.float64 and value.dtype == torch.float32)
            return value.to(dtype) if low and value.dtype != dtype else value
        if isinstance(value, torch.dtype):
            return dtype if numerics.is_low_precision(value) else value
        if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float, bool)):
            return type(value)(other(item) for item in value)
        return value

    new_args = tuple(other(a) for a in args)
    new_kwargs = {k: other(v) for k, v in kwargs.items()}
    name = func._schema.name.split("::")[-1]
    if name in ("_softmax", "_log_softmax") and len(new_args) > 2 and new_args[2]:
        if new_args[0].dtype != torch.float16:
            new_args = (new_args[0].float(), new_args[1], False)
    return promoted(new_args, name), new_kwargs


def promoted(args: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """Matrix products and convolutions need operands of one type; a conversion can leave two."""
    floats = {t.dtype for t in flat_tensors(args, {}) if t.is_floating_point()}
    if len(floats) < 2 or name in ("copy_", "where", "_to_copy"):
        return args
    if not name.lstrip("_").startswith(("mm", "bmm", "addmm", "baddbmm", "addbmm", "conv", "linear", "mkldnn", "dot",
                                        "mv", "scaled_dot", "addmv", "cat", "native_", "batch_norm", "lerp")):  # fmt: skip
        return args
    if name.startswith(("native_", "batch_norm")):
        return args
    widest = torch.float64 if torch.float64 in floats else torch.float32
    return tuple(
        a.to(widest)
        if isinstance(a, Tensor) and a.is_floating_point()
        else [t.to(widest) if t.is_floating_point() else t for t in a]
        if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)
        else a
        for a in args
    )
