"""Trees of tensors: the arguments and results of calls, in containers nested in one another."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PLAIN_TYPES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
"""Whose objects hold no tensor and are never changed."""


def map_tensors(tree: Any, visit: Callable[[Tensor], Any]) -> Any:
    """A copy of `tree` (lists, tuples, dicts, dataclasses, nested) with every tensor replaced by `visit(tensor)`.

    Containers are copied, so that a script that changes its batch afterwards does not change the record. Objects of
    other types are kept as they are.
    """
    if type(tree) in PLAIN_TYPES:
        return tree
    if isinstance(tree, Tensor):
        return visit(tree)
    if isinstance(tree, dict):
        copies = {key: map_tensors(value, visit) for key, value in tree.items()}
        return copies if type(tree) is dict else _rebuilt(tree, copies)
    if isinstance(tree, tuple):
        items = [map_tensors(value, visit) for value in tree]
        if type(tree) is tuple:
            return tuple(items)
        return named_tuple(type(tree), items) if hasattr(tree, "_make") else _try_rebuild(type(tree), items, tree)
    if isinstance(tree, list):
        items = [map_tensors(value, visit) for value in tree]
        return items if type(tree) is list else _try_rebuild(type(tree), items, tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        clone = copy.copy(tree)
        for f in dataclasses.fields(tree):
            if hasattr(tree, f.name):
                object.__setattr__(clone, f.name, map_tensors(getattr(tree, f.name), visit))
        return clone
    return tree


def named_tuple(kind: type[Any], items: list[Any]) -> Any:
    """A named tuple of these items. Its own `_make` asks for its length, which a script may have given another meaning."""
    return tuple.__new__(kind, items)


def _rebuilt(tree: dict[Any, Any], copies: dict[Any, Any]) -> Any:
    try:
        clone = copy.copy(tree)
        for key, value in copies.items():
            dict.__setitem__(clone, key, value)
            if isinstance(key, str) and key in getattr(clone, "__dict__", ()):
                clone.__dict__[key] = value
    except Exception:
        return copies
    return clone


def _try_rebuild(kind: type, items: list[Any], original: Any) -> Any:
    try:
        return kind(items)
    except Exception:
        return original


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor in a result, in a fixed order: containers, dataclasses, and the attributes of plain objects."""
    return [tensor for _, tensor in named_tensors_in(tree)]


def named_tensors_in(tree: Any) -> list[tuple[str, Tensor]]:
    """Every tensor in a result and what it is called there (`['loss_box']`, `[0]`, `.logits`)."""
    found: list[tuple[str, Tensor]] = []
    _collect(tree, "", found, depth=0)
    return found


def _collect(tree: Any, name: str, found: list[tuple[str, Tensor]], depth: int) -> None:
    if isinstance(tree, Tensor):
        found.append((name, tree))
    elif tree is None or isinstance(tree, (str, int, float, bool, nn.Module)) or depth > 6:
        return
    elif isinstance(tree, dict):
        for key, value in tree.items():
            _collect(value, f"{name}[{key!r}]", found, depth + 1)
    elif isinstance(tree, (list, tuple)):
        for position, value in enumerate(tree):
            _collect(value, f"{name}[{position}]", found, depth + 1)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for f in dataclasses.fields(tree):
            _collect(getattr(tree, f.name, None), f"{name}.{f.name}", found, depth + 1)
    elif depth <= 1 and hasattr(tree, "__dict__") and not callable(tree):
        for key, value in vars(tree).items():
            _collect(value, f"{name}.{key}", found, depth + 1)
