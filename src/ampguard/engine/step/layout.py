"""How parameters, gradients and optimizer state lie in memory: what a fused kernel takes for granted.

Asked in every step, so in loops that run in C where there are such. What is known of parameters and state is kept for
each optimizer, as long as the same tensors lie at the same addresses.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_PLAIN = frozenset((Tensor, nn.Parameter))
_NoneType = type(None)
_NUMBERS = (float, int)
_Places = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Layout:
    """What all the parameters of a group that have a gradient are."""

    dtypes: frozenset[torch.dtype]
    kinds: frozenset[str]
    """Kinds of devices."""
    devices: frozenset[torch.device]
    is_contiguous: bool
    elements: int
    kept: dict[str, Any] | None = field(default=None, repr=False, compare=False)
    """What is worked out from it, for as long as the parameters lie where they do. None of what has no address."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at some parameters and their gradients, for a check and for the step that follows it at once."""

    asked: list[Tensor]
    parameters: list[Tensor]
    """Those that have a gradient."""
    gradients: list[Tensor]
    is_plain: bool
    """Whether no gradient is of a subclass of tensors."""
    layout: Layout | None = None
    """Of the parameters, where an optimizer holds them and they are plain."""
    notes: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What the check has worked out for the step."""

    def is_of(self, parameters: list[Tensor]) -> bool:
        """Whether it was a look at these, and their gradients are still the same, as far as the ends show."""
        if len(parameters) != len(self.asked) or not all(map(operator.is_, parameters, self.asked)):
            return False
        kept = self.parameters
        return not kept or (kept[0].grad is self.gradients[0] and kept[-1].grad is self.gradients[-1])


_layouts: weakref.WeakKeyDictionary[Optimizer, dict[int, tuple[_Places, Layout]]] = weakref.WeakKeyDictionary()
_states: weakref.WeakKeyDictionary[Optimizer, tuple[Any, int, set[frozenset[torch.dtype]]]] = (
    weakref.WeakKeyDictionary()
)


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether none is of a subclass, whose memory is its own affair."""
    return set(map(type, tensors)) <= _PLAIN


def look_at(asked: list[Tensor]) -> Look:
    """The parameters that have a gradient, the gradients, and whether all gradients are plain."""
    parameters = asked
    gradients: list[Any] = [p.grad for p in asked]
    types = set(map(type, gradients))
    if _NoneType in types:
        parameters = [p for p, gradient in zip(asked, gradients, strict=True) if gradient is not None]
        gradients = [gradient for gradient in gradients if gradient is not None]
        types.discard(_NoneType)
    return Look(asked, parameters, gradients, types <= _PLAIN)


def look_at_group(optimizer: Optimizer, number: int) -> Look:
    """The same of an optimizer's group, and how its plain parameters lie in memory."""
    look = look_at(optimizer.param_groups[number]["params"])
    if not look.parameters or not are_plain(look.parameters):
        return look
    layout = layout_of(optimizer, number, look.parameters)
    return Look(look.asked, look.parameters, look.gradients, look.is_plain, layout)


def layout_of(optimizer: Optimizer, number: int, parameters: list[Tensor]) -> Layout:
    """Of plain parameters in the group of that number. Remembers addresses, not tensors: those may be gone tomorrow."""
    if type(parameters[0]) not in (Tensor, nn.Parameter):  # fakes have no address
        return _looked_at(parameters)
    places = (list(map(id, parameters)), list(map(Tensor.data_ptr, parameters)))
    of_groups = _layouts.setdefault(optimizer, {})
    known = of_groups.get(number)
    if known is None or known[0] != places:
        known = of_groups[number] = (places, _looked_at(parameters, {}))
    return known[1]


def _looked_at(parameters: list[Tensor], kept: dict[str, Any] | None = None) -> Layout:
    return Layout(
        frozenset(p.dtype for p in parameters),
        frozenset(p.device.type for p in parameters),
        frozenset(p.device for p in parameters),
        all(p.layout is torch.strided and p.is_contiguous() for p in parameters),
        sum(map(Tensor.numel, parameters)),
        kept,
    )


def types_agree(layout: Layout, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
    """Whether each gradient is of its parameter's type."""
    if len(layout.dtypes) == 1:
        return {g.dtype for g in gradients} == layout.dtypes
    return all(p.dtype == g.dtype for p, g in zip(parameters, gradients, strict=True))


def lie_alike(optimizer: Optimizer, layout: Layout, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
    """Whether plain gradients and the state lie in memory as their parameters do, without gaps, the state in their types."""
    try:
        if (
            layout.is_contiguous
            and all(map(Tensor.is_contiguous, gradients))
            and _is_state_alike(optimizer, layout.dtypes)
        ):
            return True
    except RuntimeError:  # a sparse tensor does not even answer
        return False
    if any(g.layout is not torch.strided for g in gradients):
        return False
    state = optimizer.state
    return all(_lies_alike(p, g, state.get(p, {})) for p, g in zip(parameters, gradients, strict=True))


def _is_state_alike(optimizer: Optimizer, dtypes: frozenset[torch.dtype]) -> bool:
    """Remembered, for parameters of these types, until a checkpoint is loaded, which replaces the whole state, or a
    parameter steps for the first time."""
    state = optimizer.state
    known = _states.get(optimizer)
    if known is None or known[0] is not state or known[1] != len(state):
        known = _states[optimizer] = (state, len(state), set())
    if dtypes not in known[2]:
        kept = [(p, t) for p, values in state.items() for t in _kept_of(p, values)]
        if not all(t.is_contiguous() and t.dtype == p.dtype for p, t in kept):
            return False
        known[2].add(dtypes)
    return True


def _lies_alike(p: Tensor, g: Tensor, state: dict[str, Any]) -> bool:
    """The same of one parameter in any order of dimensions, such as channels last."""
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    kept = _kept_of(p, state)
    return all(other.stride() == p.stride() for other in (g, *kept)) and all(s.dtype == p.dtype for s in kept)


def _kept_of(p: Tensor, state: dict[str, Any]) -> list[Tensor]:
    """What an optimizer keeps for each element of a parameter; it may be older than a cast of that."""
    return [t for key, t in state.items() if key != "step" and isinstance(t, Tensor) and t.shape == p.shape]


def _is_usual(group: dict[str, Any], look: Look, keys: tuple[str, ...]) -> bool:
    """Whether the options are plain numbers and the parameters are of one device and type."""
    layout = look.layout
    return (
        layout is not None
        and len(layout.devices) == len(layout.dtypes) == 1
        and all(type(group[key]) in _NUMBERS for key in keys)
    )


def moments_of(state: Any, group: dict[str, Any], look: Look) -> list[list[Tensor]] | None:
    """Adam's lists, in the order of its kernel; None where some parameter has yet to step for the first time."""
    if not look.parameters:
        return []
    if not _is_usual(group, look, ("lr", "weight_decay", "eps")) or {*map(type, group["betas"])} != {float}:
        return None
    kept = list(map(state.get, look.parameters))
    try:
        steps = [values["step"] for values in kept]
        first, second = [values["exp_avg"] for values in kept], [values["exp_avg_sq"] for values in kept]
        largest = [values["max_exp_avg_sq"] for values in kept] if group["amsgrad"] else []
    except (KeyError, TypeError):
        return None
    if {*map(type, steps)} != {Tensor} or {step.device for step in steps} != look.layout.devices:  # type: ignore[union-attr]
        return None
    return [first, second, largest, steps]


def momentum_of(state: Any, group: dict[str, Any], look: Look) -> list[list[Tensor]] | None:
    """SGD's list, which is empty without momentum; None where some buffer has yet to be begun."""
    if not look.parameters:
        return []
    if not _is_usual(group, look, ("lr", "weight_decay", "momentum", "dampening")):
        return None
    if not group["momentum"]:
        return [[]]
    kept = list(map(state.get, look.parameters))
    try:
        buffers = [values["momentum_buffer"] for values in kept]
    except (KeyError, TypeError):
        return None
    return [buffers] if {*map(type, buffers)} == {Tensor} else None
