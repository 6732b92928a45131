"""Objects of a script's own that a module is given: a graph, the instances of an image, an encoding, a cache of keys and values.

Their tensors are arguments as any other: a forward pass that puts others in their place (`data.x = relu(conv(data.x))`)
is run again from what it was given, what was computed before is followed, a fix can clean one. So is one that appends to
what an object holds, which may have been empty before. Objects of plain values alone are left as they are, and so
are those that hold more than a batch would: a trainer, a model.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ampguard.capture.record import Held, HeldGenerator, Ref
from ampguard.capture.root_calls.trees import PLAIN_TYPES

MAX_ENTRIES = 256
"""Attributes and items of a batch and of what lies in it; an object with more is something else."""
MAX_DEPTH = 4

_KNOWN = PLAIN_TYPES | {Held, Ref, HeldGenerator, Tensor, nn.Parameter, torch.Size, torch.Generator, slice}
_CONTAINERS = (list, tuple, dict)
_NOT_DATA = (type, nn.Module, torch.optim.Optimizer, types.ModuleType, types.FunctionType, types.MethodType)


Holder: TypeAlias = dict[Any, Any] | list[Any]


class Places:
    """Where the tensors of an object lie: a dictionary or list, the name or number in it, and what the script calls it (`.x`,
    `['x']`, `.keys[0]`).

    `holders`: every dictionary and list in it, and a copy of each as the object was given.
    """

    __slots__ = ("found", "holders")

    def __init__(self) -> None:
        self.found: list[tuple[Holder, Any, str]] = []
        self.holders: list[tuple[Holder, Any]] = []


@dataclass(slots=True)
class GivenObject:
    """An object as it was given: its tensors, which stand in `values` as those of every recorded argument do."""

    thing: Any
    places: Places
    values: list[Any]


def with_objects(tree: Any, visit: Callable[[Tensor], Any]) -> Any:
    """Recorded arguments with each object that holds tensors replaced by a `GivenObject`; the tree itself without any."""
    items = tree.values() if type(tree) is dict else tree
    for item in items:
        kind = type(item)
        if kind not in _KNOWN and (kind not in _CONTAINERS or _has_objects(item, 1)):
            return _replaced(tree, visit, 0)
    return tree


def _has_objects(tree: Any, depth: int) -> bool:
    for item in tree.values() if type(tree) is dict else tree:
        kind = type(item)
        if kind not in _KNOWN and (kind not in _CONTAINERS or (depth < MAX_DEPTH and _has_objects(item, depth + 1))):
            return True
    return False


def _replaced(tree: Any, visit: Callable[[Tensor], Any], depth: int) -> Any:
    kind = type(tree)
    if kind in _KNOWN or depth > MAX_DEPTH:
        return tree
    if kind is dict:
        return {key: _replaced(value, visit, depth + 1) for key, value in tree.items()}
    if kind in (list, tuple):
        return kind(_replaced(value, visit, depth + 1) for value in tree)
    return _given(tree, visit)


def _given(thing: Any, visit: Callable[[Tensor], Any]) -> Any:
    if isinstance(thing, (*_CONTAINERS, *_NOT_DATA, Tensor)) or hasattr(thing, "__dataclass_fields__"):
        return thing
    try:
        places, tensors = _searched(thing)
    except ValueError:
        return thing
    if not tensors and _is_full(places.holders):
        return thing
    return GivenObject(thing, places, [visit(tensor) for tensor in tensors])


def _is_full(holders: list[tuple[Holder, Any]]) -> bool:
    """Whether an object holds plain values alone, as a configuration does: nothing in it waits to be filled."""
    if len(holders) != 1:
        return not holders
    return all(value is not None for value in holders[0][1].values()) if holders[0][1] else False


def _searched(thing: Any) -> tuple[Places, list[Tensor]]:
    """Where the tensors of an object lie, and the tensors. ValueError: this is no batch."""
    waiting: list[tuple[Any, int, str]] = [(thing, 0, "")]
    places, tensors = Places(), list[Tensor]()
    seen: set[int] = set()
    entries = 0
    while waiting:
        holder, depth, path = waiting.pop()
        inside: Any = holder if type(holder) in (dict, list) else getattr(holder, "__dict__", None)
        if type(inside) not in (dict, list) or id(inside) in seen:
            continue
        seen.add(id(inside))
        entries += len(inside)
        if entries > MAX_ENTRIES:
            raise ValueError(f"more than {MAX_ENTRIES} entries")
        places.holders.append((inside, inside.copy()))
        for key, value in inside.items() if type(inside) is dict else enumerate(inside):
            if isinstance(value, _NOT_DATA[1:3]):
                raise ValueError(f"{key} is a {type(value).__name__}")
            name = path + _name(key, is_item=inside is holder)
            if isinstance(value, Tensor):
                places.found.append((inside, key, name))
                tensors.append(value)
            elif depth < MAX_DEPTH and type(value) not in _KNOWN and not isinstance(value, _NOT_DATA):
                waiting.append((value, depth + 1, name))
    return places, tensors


def _name(key: Any, is_item: bool) -> str:
    """As the script gets at it; what an object keeps to itself (`_store`) is no part of that."""
    if is_item:
        return f"[{key!r}]"
    return "" if str(key).startswith("_") else f".{key}"
