"""Which operator of the eager replay a part of a compiled graph stands for."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from ampguard import compat
from ampguard.diagnose.locate.lineage import LOOK_THROUGH
from ampguard.replay.compiled import Part, Seen
from ampguard.replay.compiled_graphs import CaughtGraph, place_of_node
from ampguard.replay.rebuild import Replayer
from ampguard.replay.trace import Trace, TracedOp, traced


class OperatorsSeen(compat.DispatchMode):
    """Notes the operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def operators_in(seen: Seen) -> list[Any]:
    """The ATen operators that a part is made of, those that only look at their operand left out where others are left."""
    with OperatorsSeen() as mode:
        seen.eagerly()
    working = [op for op in mode.operators if short(op) not in LOOK_THROUGH]
    return list(dict.fromkeys(working or mode.operators))


def short(func: Any) -> str:
    return str(compat.schema_of(func).name).rsplit("::", 1)[-1]


def operator_of(
    trace: Trace, graph: CaughtGraph, part: Part, seen: Seen, replayer: Replayer, is_of_backward: bool
) -> TracedOp:
    """The operator of the eager replay at which the part ends; of a backward pass, the first that differentiates it."""
    nodes = graph.nodes[part.first : part.last]
    names = [str(op) for op in operators_in(seen)]
    last = next((n for n in reversed(nodes) if place_of_node(n) is not None), nodes[-1])
    found = matching(trace, graph, last, names, replayer)
    if found is None:
        func = operators_in(seen)[-1]
        found = TracedOp(len(trace.ops), -1, func, str(func), None, None, None)
        found.outputs = [traced(t) for t in seen.outputs if isinstance(t, Tensor)][:1]
    if not is_of_backward:
        return found
    derived = [op for op in trace.ops if op.in_backward and op.forward == found.index]
    return next((op for op in derived if op.short_name not in LOOK_THROUGH), found)


def matching(trace: Trace, graph: CaughtGraph, node: fx.Node, names: list[str], replayer: Replayer) -> TracedOp | None:
    """The operator at a node's line and in its module; of several, the one that comes as late among its like."""
    place = place_of_node(node)
    modules = [replayer.names[m] for m in graph.modules_of(node) if m in replayer.names]

    def is_alike(op: TracedOp) -> bool:
        is_there = op.line is None or place is None or (op.line.code.co_filename, op.line.number) == place
        return not op.in_backward and op.name in names and is_there and (not modules or op.module == modules[-1])

    found = [op for op in trace.ops if is_alike(op)]
    found = [op for op in found if op.name == names[-1]] or found
    before = graph.nodes[: graph.nodes.index(node)]
    like = [n for n in before if n.target == node.target and place_of_node(n) == place]
    like = [n for n in like if graph.modules_of(n)[-1:] == graph.modules_of(node)[-1:]]
    return found[min(len(like), len(found) - 1)] if found else None
