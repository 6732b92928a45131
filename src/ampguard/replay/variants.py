"""How a replay differs from the step as it ran: another precision, a changed operand, other values in a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ampguard import compat, numerics
from ampguard.capture.record import Ref
from ampguard.capture.root_calls.trees import map_tensors
from ampguard.replay.operators import flat_tensors

Intervention = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called in place of an operator with `(func, args, kwargs)`; returns the operator's result."""

CodePlace = tuple[str, str | None, int | None]
"""An operator's name, and the file and line of the code that runs it."""

RunKey = tuple[int, str, int]
"""An event, an operator's name, and which of its runs within the event: the same in every replay, with a graph or without."""


class CompiledCode(Protocol):
    """How compiled callables run in a replay; without one they run eagerly."""

    retains_graph: bool
    """Whether backward passes keep what they need for another one: compiled ones may refuse to."""

    def running(self) -> AbstractContextManager[Any]:
        """The context of one replay."""


@dataclass(frozen=True)
class Variant:
    """How a replay differs from the step as it ran.

    `convert` computes everything that ran in low precision in another type. `force_fp32` names modules (by object)
    that leave autocast, `fp32_lines` lines outside every module. `interventions` replace single operators.
    `loss_scale_factor` multiplies the loss scale. `tensors` replaces held tensors (a batch, a parameter, a buffer) by
    identity, made ones by their reference. The operands and results of the operators in `capture` are kept. With
    `zero_shares` the zeros in each result of a backward pass are counted; `differentiate` names a part of the loss to be
    differentiated in its place. `compiled` lets compiled code run as such: no operator is seen then, and nothing else
    can be changed. `within` is a context that the whole replay runs in (another backend of PyTorch's own). With
    `keeps_own_casts` modules that leave autocast still cast to low precision where their own code says so.
    """

    convert: torch.dtype | None = None
    force_fp32: frozenset[int] = frozenset()
    fp32_lines: frozenset[tuple[str, int]] = frozenset()
    interventions: dict[RunKey, Intervention] = field(default_factory=dict)
    at_places: dict[CodePlace, Intervention] = field(default_factory=dict)
    loss_scale_factor: float = 1.0
    tensors: dict[int | Ref, Tensor] = field(default_factory=dict)
    capture: frozenset[int] = frozenset()
    zero_shares: bool = False
    differentiate: Ref | None = None
    compiled: CompiledCode | None = None
    within: Callable[[], AbstractContextManager[Any]] | None = None
    keeps_own_casts: bool = False

    def __hash__(self) -> int:
        return id(self)

    def with_base(self, base: Variant) -> Variant:
        """This variant of a step that is changed by `base` already."""
        return Variant(
            convert=self.convert or base.convert,
            force_fp32=base.force_fp32 | self.force_fp32,
            fp32_lines=base.fp32_lines | self.fp32_lines,
            interventions=base.interventions | self.interventions,
            at_places=base.at_places | self.at_places,
            loss_scale_factor=base.loss_scale_factor * self.loss_scale_factor,
            tensors=base.tensors | self.tensors,
            capture=base.capture | self.capture,
            zero_shares=base.zero_shares or self.zero_shares,
            differentiate=self.differentiate or base.differentiate,
            compiled=self.compiled or base.compiled,
            within=self.within or base.within,
            keeps_own_casts=self.keeps_own_casts or base.keeps_own_casts,
        )


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

    def as_it_was(self, copies: Mapping[int, tuple[Tensor, int, Tensor]]) -> Captured:
        """With a copy in the place of each tensor that was written to since.

        `copies`: by identity, each tensor, how often it had been written to, and a copy of what it held.
        """

        def kept(tensor: Tensor) -> Tensor:
            known = copies.get(id(tensor))
            return tensor if known is None or compat.version_of(tensor) == known[1] else known[2]

        return Captured(
            self.func, map_tensors(self.args, kept), map_tensors(self.kwargs, kept), map_tensors(self.output, kept)
        )

    @property
    def result(self) -> Tensor:
        output = self.output
        return output[0] if isinstance(output, (tuple, list)) else output  # type: ignore[no-any-return]


def widened(tensor: Tensor) -> Tensor:
    """Low precision to float32; anything else as it is."""
    return compat.in_class_of(tensor.float(), tensor) if numerics.is_low_precision(tensor.dtype) else tensor


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
    name = compat.schema_of(func).name.split("::")[-1]
    widens = name in ("_softmax", "_log_softmax") and len(new_args) > 2 and new_args[2]
    if widens and new_args[0].dtype != torch.float16:
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
