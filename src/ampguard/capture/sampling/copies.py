"""Copies of trained parameters and of their optimizers, from which later steps can be run again."""

from __future__ import annotations

import collections
import copy
import math
import types
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat

LENT = frozenset({"grad_scale", "found_inf"})
"""Attributes that a scaler lends an optimizer during its step."""

PLAIN = (int, float, complex, str, bytes, type, Tensor, torch.dtype, torch.device, types.FunctionType)
MAX_DEPTH = 6


@dataclass(slots=True)
class CopiedOptimizer:
    """An optimizer's own attributes, bound to copies of its parameters; no hooks, and nothing of the script's."""

    original: weakref.ref[Optimizer]
    kind: type[Optimizer]
    attributes: dict[str, Any]

    def bound_to(self, others: dict[int, Any]) -> Optimizer:
        """A fresh optimizer whose parameters are `others`, by the identity of the copies here."""
        fresh: Optimizer = object.__new__(self.kind)
        fresh.__dict__ = copy.deepcopy(self.attributes, dict(others))
        return fresh


class Snapshot:
    """The trained parameters and the optimizers as they stood."""

    def __init__(self, parameters: list[tuple[Tensor, Tensor]], optimizers: list[CopiedOptimizer], size: int) -> None:
        self.optimizers = optimizers
        self.size = size
        """Bytes of the copies."""
        self._copies = {id(original): (original, duplicate) for original, duplicate in parameters}

    def has(self, tensor: Tensor) -> bool:
        known = self._copies.get(id(tensor))
        return known is not None and known[0] is tensor

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter of the script, and its copy."""
        return list(self._copies.values())

    def number_of(self, optimizer: Optimizer) -> int | None:
        return next((i for i, o in enumerate(self.optimizers) if o.original() is optimizer), None)

    def live_optimizers(self) -> list[Optimizer]:
        return [optimizer for o in self.optimizers if (optimizer := o.original()) is not None]

    def stand_ins(self) -> tuple[dict[int, Tensor], list[Optimizer]]:
        """Fresh parameters, by the identity of the script's own, and fresh optimizers that update them."""
        fresh = {key: (duplicate, leaf_like(duplicate)) for key, (_, duplicate) in self._copies.items()}
        by_copy = {id(duplicate): leaf for duplicate, leaf in fresh.values()}
        return {key: leaf for key, (_, leaf) in fresh.items()}, [o.bound_to(by_copy) for o in self.optimizers]


def take_snapshot(optimizers: Sequence[Optimizer]) -> Snapshot | str:
    """Copy what the optimizers train and what they know; the reason in words where that cannot be done."""
    originals = list({id(p): p for p in parameters_of(optimizers)}.values())
    if any(type(p) not in (nn.Parameter, Tensor) or p.layout != torch.strided or not p.is_leaf for p in originals):
        return "the weights are no plain tensors"
    for optimizer in optimizers:
        strange = next((k for k, v in own_attributes(optimizer).items() if not is_plain(v)), None)
        if strange is not None:
            return f"{type(optimizer).__name__}.{strange} cannot be copied"
    copies = {id(p): leaf_like(p) for p in originals}
    copied = []
    for optimizer in optimizers:
        try:
            attributes = copy.deepcopy(own_attributes(optimizer), dict(copies))
        except Exception as why:
            return f"{type(optimizer).__name__} cannot be copied: {type(why).__name__}: {why}"[:200]
        copied.append(CopiedOptimizer(weakref.ref(optimizer), type(optimizer), attributes))
    return Snapshot([(p, copies[id(p)]) for p in originals], copied, size_of(optimizers))


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's options and state: without hooks, and without what others hung on it (a scheduler's `step`)."""
    hooks = compat.hook_attributes(optimizer)
    left_out = {*hooks, *LENT}
    functions = (types.FunctionType, types.MethodType)
    kept = {k: v for k, v in vars(optimizer).items() if k not in left_out and not isinstance(v, functions)}
    return {**kept, **{name: collections.OrderedDict() for name in hooks}}


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is numbers, text, tensors and containers of these: what a copy of does no harm."""
    if isinstance(value, dict):
        return depth < MAX_DEPTH and all(is_plain(v, depth + 1) for pair in value.items() for v in pair)
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return depth < MAX_DEPTH and all(is_plain(item, depth + 1) for item in value)
    return value is None or isinstance(value, PLAIN)


def leaf_like(parameter: Tensor) -> Tensor:
    """A parameter with the same values and of its own memory."""
    values = parameter.detach().clone(memory_format=torch.preserve_format)
    if isinstance(parameter, nn.Parameter):
        return nn.Parameter(values, requires_grad=parameter.requires_grad)
    return values.requires_grad_(parameter.requires_grad)


def parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def size_of(optimizers: Sequence[Optimizer]) -> int:
    """Bytes of the trained parameters and of the optimizers' state."""
    tensors = {id(p): p for p in parameters_of(optimizers)}
    for optimizer in optimizers:
        for state in getattr(optimizer, "state", {}).values():  # (one of another kind may have none)
            if isinstance(state, dict):
                tensors |= {id(v): v for v in state.values() if isinstance(v, Tensor)}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def wide_norm(tensors: Iterable[Tensor]) -> float:
    """The 2-norm over all tensors, in float64: that of weights that are about to leave float32 is no infinity."""
    return math.hypot(*(float(torch.linalg.vector_norm(t.detach(), dtype=torch.float64)) for t in tensors))


def distance(pairs: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    """||a - b|| / ||b|| over the pairs (a, b); None where that is no number."""
    with torch.no_grad():
        apart = wide_norm([a.detach().double() - b.detach().double() for a, b in pairs])
        size = wide_norm([b for _, b in pairs])
    return apart / size if size and math.isfinite(apart) and math.isfinite(size) else None
