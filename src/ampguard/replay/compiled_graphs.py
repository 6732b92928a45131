"""Graphs that Dynamo made of compiled code, and pieces of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from ampguard.capture.frames import is_user_file

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
MODES = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled", "set_grad_enabled")
"""What such a node changes is around the nodes behind it: it belongs to none of them, and runs by itself."""


class CaughtGraph:
    """A graph on its way to a backend."""

    def __init__(self, module: fx.GraphModule, backend: Callable[..., Any]) -> None:
        self.module = module
        self.backend = backend
        self.nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]

    @cached_property
    def cuts(self) -> list[int]:
        """Where the nodes may be parted: not between an operator with several results and those."""
        starts = [i for i, node in enumerate(self.nodes) if not is_item(node)]
        return [*starts, len(self.nodes)]

    def around(self, node: fx.Node) -> tuple[int, int]:
        """The shortest stretch that a node is in."""
        position = self.nodes.index(node)
        return max(c for c in self.cuts if c <= position), min(c for c in self.cuts if c > position)

    def pieces(self, first: int, last: int) -> list[tuple[int, int]]:
        """A stretch of nodes without those that change modes: what is left of it, in order."""
        found: list[tuple[int, int]] = []
        start = first
        for i in range(first, last + 1):
            if i == last or changes_modes(self.nodes[i]):
                if start < i:
                    found.append((start, i))
                start = i + 1
        return found

    def modules_of(self, node: fx.Node) -> list[int]:
        """Identities of the modules in which a node runs, from the outermost to the innermost."""
        stack = node.meta.get("nn_module_stack") or {}
        keys = (str(key).split("@")[0] for key in stack)
        return [int(key) for key in keys if key.isdigit()]

    def inside(self, module: int) -> list[int]:
        """The positions of the nodes that run inside a module."""
        return [i for i, node in enumerate(self.nodes) if module in self.modules_of(node)]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some nodes as a graph of their own, which nodes' results go in, and whose come out."""

    module: fx.GraphModule
    inputs: list[fx.Node]
    outputs: list[fx.Node]


def makes_tensor(node: fx.Node) -> bool:
    """Whether a node's result is one tensor, as far as Dynamo noted it."""
    return isinstance(node.meta.get("example_value"), Tensor)


def is_item(node: fx.Node) -> bool:
    """Whether a node takes one of several results of another."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def changes_modes(node: fx.Node) -> bool:
    """Whether a node switches autocast or gradients on or off for those behind it."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in MODES


def place_of_node(node: fx.Node) -> tuple[str, int] | None:
    """File and line of the innermost frame that Dynamo noted for a node and that is neither PyTorch's nor ours."""
    noted = FRAME.finditer(node.meta.get("stack_trace") or "")
    frames = [frame for frame in noted if is_user_file(frame["file"])]
    return (frames[-1]["file"], int(frames[-1]["line"])) if frames else None


def part_of(module: fx.GraphModule, nodes: list[fx.Node], keeps_all: bool = False) -> Piece:
    """The graph of some consecutive nodes. Its results are what others use; with `keeps_all` every tensor is."""
    inside = set(nodes)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    outside = [used for node in nodes for used in node.all_input_nodes if used not in inside]
    inputs = list(dict.fromkeys(node for node in outside if node.op != "get_attr"))
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
    for node in dict.fromkeys(outside):
        if node.op == "get_attr":
            copies[node] = graph.node_copy(node)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda used: copies[used])
    outputs = [
        node for node in nodes if any(user not in inside for user in node.users) or (keeps_all and makes_tensor(node))
    ]
    graph.output(tuple(copies[node] for node in outputs))
    return Piece(fx.GraphModule(module, graph), inputs, outputs)


Run = Callable[[Any, list[fx.Node], Mapping[fx.Node, Any]], list[tuple[fx.Node, Any]]]


class Interpreted(fx.Interpreter):
    """A graph run node by node, except for some stretches, which `run` gives the results of."""

    def __init__(self, module: fx.GraphModule, spans: list[tuple[Any, list[fx.Node]]], run: Run) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._run = run
        self._span = {node: span for span in spans for node in span[1]}
        self._results: dict[fx.Node, Any] = {}
        self._done: set[int] = set()

    def run_node(self, n: fx.Node) -> Any:
        span = self._span.get(n)
        if span is None:
            return super().run_node(n)
        if id(span) not in self._done:
            self._done.add(id(span))
            self._results.update(self._run(*span, self.env))
        return self._results.get(n)
