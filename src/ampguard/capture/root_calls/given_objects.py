"""Objects of a script's own that a module is given: a graph, the instances of an image, an encoding.

Their tensors are arguments as any other: a forward pass that puts others in their place (`data.x = relu(conv(data.x))`)
is run again from what it was given, what was computed before is followed, a fix can clean one. Objects without tensors
are left as they are, and so are those that hold more than a batch would: a trainer, a model.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampguard.capture.record import Held, HeldGenerator, Ref
from ampguard.capture.root_calls.trees import PLAIN_TYPES

MAX_ENTRIES = 64
"""Attributes and items of a batch and of what lies in it; an object with more is something else."""
MAX_DEPTH = 4

_KNOWN = PLAIN_TYPES | {Held, Ref, HeldGenerator, Tensor, nn.Parameter, torch.Size, torch.Generator, slice}
_CONTAINERS = (list, tuple, dict)
_NOT_DATA = (type, nn.Module, torch.optim.Optimizer, types.ModuleType, types.FunctionType, types.MethodType)


class Places:
    """Where the tensors of an object lie: a dictionary, the name in it, and what the script calls it (`.x`, `['x']`)."""

    __slots__ = ("found",)

    def __init__(self, found: list[tuple[dict[Any, Any], Any, str]]) -> None:
        self.found = found


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
        found = list(_tensors_in(thing))
    except ValueError:
        return thing
    if not found:
        return thing
    return GivenObject(thing, Places([place for place, _ in found]), [visit(tensor) for _, tensor in found])


def _tensors_in(thing: Any) -> Iterator[tuple[tuple[dict[Any, Any], Any, str], Tensor]]:
    """Where each tensor of an object lies, and the tensor. ValueError: this is no batch."""
    waiting: list[tuple[Any, int, str]] = [(thing, 0, "")]
    seen: set[int] = set()
    entries = 0
    while waiting:
        holder, depth, path = waiting.pop()
        inside = holder if type(holder) is dict else getattr(holder, "__dict__", None)
        if type(inside) is not dict or id(inside) in seen:
            continue
        seen.add(id(inside))
        entries += len(inside)
        if entries > MAX_ENTRIES:
            raise ValueError(f"more than {MAX_ENTRIES} entries")
        for key, value in inside.items():
            if isinstance(value, _NOT_DATA[1:3]):
                raise ValueError(f"{key} is a {type(value).__name__}")
            name = path + _name(key, is_item=inside is holder)
            if isinstance(value, Tensor):
                yield (inside, key, name), value
            elif depth < MAX_DEPTH and type(value) not in _KNOWN and not isinstance(value, _NOT_DATA):
                waiting.append((value, depth + 1, name))


def _name(key: Any, is_item: bool) -> str:
    """As the script gets at it; what an object keeps to itself (`_store`) is no part of that."""
    if is_item:
        return f"[{key!r}]"
    return "" if str(key).startswith("_") else f".{key}"
