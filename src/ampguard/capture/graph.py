"""The autograd graph behind a loss, as far as the results of modules: its shape, its plain arguments, what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from ampguard import compat

MAX_NODES = 64
"""Nodes between a loss and the modules' results, beyond which a graph is not looked at."""

PLAIN = (int, float, bool, str, type(None))

Path: TypeAlias = tuple[int, ...]
"""Which edge to follow at each node, from the loss on."""


@dataclass(frozen=True, slots=True)
class NodeSketch:
    """A node: what it computes and its plain arguments. Where it `ends`, a module's result begins."""

    path: Path
    name: str
    plain: tuple[tuple[str, Any], ...]


def sketch(
    node: Any, ends: set[int], wanted: Sequence[Tensor]
) -> tuple[tuple[NodeSketch, ...], dict[int, tuple[Path, str]]] | None:
    """The graph behind `node`, and where in it each of the wanted tensors (by identity) is kept.

    `ends`: identities of the nodes that made the results of modules. None where the graph is too large.
    """
    sought = {id(tensor) for tensor in wanted}
    found: dict[int, tuple[Path, str]] = {}
    nodes: list[NodeSketch] = []
    seen: dict[int, Any] = {}
    """By identity, which a node keeps only as long as somebody holds it."""
    waiting: list[tuple[Path, Any]] = [((), node)]
    while waiting:
        path, current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen[id(current)] = current
        if len(nodes) >= MAX_NODES:
            return None
        if id(current) in ends:
            nodes.append(NodeSketch(path, current.name(), ()))
            continue
        saved = compat.saved_in(current)
        for name, value in saved:
            if id(value) in sought:
                found.setdefault(id(value), (path, name))
        nodes.append(NodeSketch(path, current.name(), tuple((n, v) for n, v in saved if _is_plain(v))))
        edges = enumerate(current.next_functions)
        waiting += [((*path, edge), following) for edge, (following, _) in edges if following is not None]
    return tuple(nodes), found


def find(node: Any, path: Path, name: str) -> Any:
    """What the node at the end of `path` keeps under `name`; None where there is no such node."""
    try:
        for edge in path:
            node = node.next_functions[edge][0]
        return getattr(node, name)
    except (AttributeError, IndexError, RuntimeError):
        return None


def is_alike(node: Any, nodes: Sequence[NodeSketch]) -> bool:
    """Whether the graph behind `node`, perhaps used up by now, is the one that was sketched."""
    for known in nodes:
        current = node
        try:
            for edge in known.path:
                current = current.next_functions[edge][0]
            if current.name() != known.name or any(getattr(current, n) != value for n, value in known.plain):
                return False
        except (AttributeError, IndexError, RuntimeError):
            return False
    return True


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(isinstance(v, PLAIN) for v in value))
