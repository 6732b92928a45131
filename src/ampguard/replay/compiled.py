"""Compiled code in a replay: run once more as it was compiled, or run eagerly but for some parts of its graphs.

Dynamo turns what the script compiles into graphs and gives each to the script's backend. For a replay in parts the
graphs are caught on their way: they are then interpreted node by node, and a stretch of nodes is given to the backend
by itself. What the script has compiled is left as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ampguard import compat
from ampguard.capture.record import Modes
from ampguard.capture.root_calls.surroundings import current_modes, modes_of
from ampguard.replay.compiled_graphs import CaughtGraph, Interpreted, part_of

Backend = Callable[..., Any]
"""What `torch.compile` was given: called with a graph and its inputs, returns what runs in the graph's place."""


class AsCompiled:
    """The step's compiled callables run what they compiled for it. Raises where they would have to compile anew."""

    def __init__(self) -> None:
        self.retains_graph = False

    def running(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = compat.as_compiled()
        return context


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes `first` to `last` (exclusive) of the graph that runs as the `call`-th compiled graph of a replay."""

    call: int
    first: int
    last: int


@dataclass(slots=True)
class Seen:
    """What went into compiled nodes and what came out of them, when they ran; `nodes` are those that the results are of."""

    call: int
    module: fx.GraphModule
    modes: Modes
    inputs: list[Any]
    outputs: list[Any]
    nodes: list[fx.Node]

    def eagerly(self) -> list[Any]:
        """The same results from the same inputs, operator by operator and without gradients."""
        with modes_of(self.modes), torch.no_grad():
            return list(self.module(*self.inputs))


class _Through:
    """A backend that catches the graphs on their way to the script's own; one for each of those, for the whole run.

    Dynamo keeps what it compiles by backend: a second investigation finds the graphs of the first.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.bench: InParts | None = None

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = CaughtGraph(module, self.backend)
        if self.bench is not None:
            self.bench.has_compiled = True

        def run(*args: Any) -> Any:
            return module(*args) if self.bench is None else self.bench.run(graph, args)

        return run


_known: dict[int, _Through] = {}


@dataclass(slots=True)
class InParts:
    """Compiled callables run their graphs eagerly, except for the `parts`, which their own backend compiles.

    `calls` are the graphs that ran in the last replay, in order, and `pieces` what was compiled of them. `other` is a
    backend to use in place of their own. With `keeps_all` every operator's result is one of the compiled code.
    """

    parts: tuple[Part, ...] = ()
    other: Backend | None = None
    keeps_all: bool = False
    retains_graph: bool = False
    calls: list[CaughtGraph] = field(default_factory=list)
    seen: dict[Part, Seen] = field(default_factory=dict)
    pieces: list[Seen] = field(default_factory=list)
    has_compiled: bool = False
    compilations: int = 0
    _code: dict[Any, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.calls.clear()
        self.seen.clear()
        self.pieces.clear()
        self.has_compiled = False
        with compat.compiling_through(self._through) as is_possible:
            if not is_possible:
                raise RuntimeError("this PyTorch does not tell which backend compiles")
            try:
                yield
            finally:
                for through in _known.values():
                    through.bench = None
                if self.has_compiled:
                    compat.allow_one_more_compilation()

    def _through(self, backend: Backend) -> _Through | None:
        if isinstance(backend, _Through):
            return None
        through = _known.get(id(backend))
        if through is None:
            through = _known[id(backend)] = _Through(backend)
        through.bench = self
        return through

    def run(self, graph: CaughtGraph, args: tuple[Any, ...]) -> Any:
        """One call of a graph: eager but for the parts that belong to it."""
        number = len(self.calls)
        self.calls.append(graph)
        mine = [part for part in self.parts if part.call == number]
        if not mine:
            return graph.module(*args)
        spans = [
            (part, graph.nodes[first:last]) for part in mine for first, last in graph.pieces(part.first, part.last)
        ]
        return Interpreted(graph.module, spans, lambda part, nodes, env: self._compiled(graph, part, nodes, env)).run(
            *args
        )

    def _compiled(self, graph: CaughtGraph, part: Part, nodes: list[fx.Node], env: Mapping[fx.Node, Any]) -> list[Any]:
        """The results of some nodes, run as one compiled graph."""
        piece = part_of(graph.module, nodes, self.keeps_all)
        inputs = [env[node] for node in piece.inputs]
        backend = self.other or compat.without_device_graphs(graph.backend)
        key = (id(graph), nodes[0].name, nodes[-1].name, id(backend), self.keeps_all, *state_of(inputs))
        run = self._code.get(key)
        if run is None:
            self.compilations += 1
            own = part_of(graph.module, nodes, self.keeps_all).module  # which the backend may rewrite
            run = self._code[key] = backend(own, inputs)
        outputs = list(run(*inputs))
        seen = Seen(part.call, piece.module, current_modes(), inputs, outputs, piece.outputs)
        self.seen[part] = seen
        self.pieces.append(seen)
        return list(zip(piece.outputs, outputs, strict=True))


def state_of(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """All that compiled code may depend on."""
    modes: tuple[Any, ...] = (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )
    if torch.cuda.is_available():
        modes = (*modes, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
    return (
        *modes,
        *((t.shape, t.stride(), t.dtype, t.requires_grad) if isinstance(t, Tensor) else t for t in inputs),
    )
