"""What an object that is being saved holds, told by its content: weights, an optimizer's state, a scaler's state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.numerics import is_finite

MAX_DEPTH = 6
MAX_ITEMS = 100_000
SCALER_KEYS = frozenset({"scale", "growth_factor", "backoff_factor", "growth_interval"})


@dataclass
class Contents:
    """What was found in it."""

    has_model: bool = False
    has_optimizer: bool = False
    has_scaler: bool = False
    weights: list[tuple[str, Tensor]] = field(default_factory=list)
    """Floating-point tensors by their names, those of an optimizer's state left out."""
    loose: set[int] = field(default_factory=set)
    """Which of these (by identity) lie by themselves, or under names that no module gave: they may be a history of losses."""
    moments: set[int] = field(default_factory=set)
    """The memory of an optimizer's state: whose it is."""
    items: int = 0


def contents_of(saved: Any) -> Contents:
    """Look through dictionaries, lists and modules."""
    found = Contents()
    _look(saved, "", found, 0)
    return found


def _look(value: Any, name: str, found: Contents, depth: int) -> None:
    found.items += 1
    if depth > MAX_DEPTH or found.items > MAX_ITEMS:
        return
    if isinstance(value, nn.Module):
        found.has_model = True
        _add_weights({**compat.named_parameters(value), **compat.named_buffers(value)}, name, found)
    elif isinstance(value, torch.optim.Optimizer):
        found.has_optimizer = True
        found.moments |= moments_in(value.state)
    elif isinstance(value, compat.GRAD_SCALER):
        found.has_scaler = True
    elif isinstance(value, Tensor):
        _add_weights({"": value}, name, found, are_loose=True)
    elif isinstance(value, Mapping):
        _look_into(value, name, found, depth)
    elif isinstance(value, (list, tuple)):
        for position, inner in enumerate(value):
            _look(inner, f"{name}[{position}]", found, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            _look(getattr(value, one.name, None), f"{name}.{one.name}" if name else one.name, found, depth + 1)


def _look_into(value: Mapping[Any, Any], name: str, found: Contents, depth: int) -> None:
    if "state" in value and "param_groups" in value:
        found.has_optimizer = True
        found.moments |= moments_in(value["state"])
        for key in value.keys() - {"state", "param_groups"}:  # what travels in it: FastReID's scaler, by a hook
            _look(value[key], f"{name}.{key}", found, depth + 1)
    elif value.keys() >= SCALER_KEYS:
        found.has_scaler = True
    elif value and all(isinstance(inner, Tensor) and isinstance(key, str) for key, inner in value.items()):
        found.has_model = True
        _add_weights(value, name, found, are_loose=not any("." in key for key in value))
    else:
        for key, inner in value.items():
            _look(inner, str(key) if not name else f"{name}.{key}", found, depth + 1)


def moments_in(state: Any) -> set[int]:
    """The memory of the tensors that an optimizer keeps for its parameters."""
    each = [one for one in state.values() if isinstance(one, Mapping)] if isinstance(state, Mapping) else []
    return {compat.storage_key(t) for one in each for t in one.values() if isinstance(t, Tensor)} - {0}


def _add_weights(tensors: Mapping[str, Tensor], name: str, found: Contents, are_loose: bool = False) -> None:
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.layout == torch.strided and compat.has_values(tensor):
            found.weights.append((key or name, tensor))
            if are_loose:
                found.loose.add(id(tensor))


def spoiled(
    found: Contents, trained: set[int], live: Callable[[], dict[str, Tensor]]
) -> list[tuple[str, Tensor, float | None]]:
    """Weights that are not finite, and the largest value of the live tensor where a cast for the file has made Inf of that.

    NaN anywhere; Inf in what an optimizer trains (`trained`: its memory), or in a copy of what is finite in the live
    model. A buffer may begin at Inf on purpose. Waits for the device, as saving does.
    """
    bad = [(name, t) for name, t in found.weights if not is_finite(t.detach())]
    if not bad:
        return []
    state = live()
    known = trained | {compat.storage_key(t) for t in state.values()} - {0}
    shapes = {tensor.shape for tensor in state.values()}
    spoiled = []
    for name, tensor in bad:
        is_trained = compat.storage_key(tensor) in trained
        may_be_a_weight = compat.storage_key(tensor) in known or name in state or tensor.shape in shapes
        if id(tensor) in found.loose and state and not may_be_a_weight:
            continue
        source = None if is_trained else _finite_source(tensor, state.get(name))
        if source is not None or is_trained or bool(tensor.isnan().any()):
            spoiled.append((name, tensor.detach(), _cast_from(source, tensor) if source is not None else None))
    return spoiled


def _finite_source(saved: Tensor, source: Tensor | None) -> Tensor | None:
    """The live tensor of that name where it is finite; what is saved may be a copy of it."""
    if source is None or source.shape != saved.shape or not is_finite(source.detach()):
        return None
    return source.detach()


def _cast_from(source: Tensor, saved: Tensor) -> float | None:
    """The largest value of a tensor that the type of what is saved cannot hold; None where no cast has made it bad.

    A cast makes Inf of what is too large, and nothing of NaN. Another module may have weights of the same name.
    """
    largest = float(source.abs().max())
    is_cast = torch.finfo(saved.dtype).max < torch.finfo(source.dtype).max and not bool(saved.isnan().any())
    return largest if is_cast and largest > torch.finfo(saved.dtype).max else None
