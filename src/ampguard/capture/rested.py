"""What the glue of a step was, without a tape: read off the autograd graph.

Between the last module and `backward` most loops compute their loss by the same few operators in every step. Of these
the graph keeps every operand that a derivative needs (a criterion's target, its weights). A `Plan`, learnt from taped
steps, says which operators they are and where each tensor is found that no module returned; with it the operators of a
step that was not taped can be told, if its graph is the one that was learnt.

There is no plan for glue with an operand that the graph does not keep, that draws random numbers, writes in place, or
computes between two modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.graph import NodeSketch, Path, find, is_alike, sketch
from ampguard.capture.record import (
    BackwardCall,
    Event,
    GlueOp,
    Held,
    HeldGenerator,
    Line,
    Ref,
    RestedGlue,
    RootCall,
    held_in,
    leaves,
    refs_in,
)
from ampguard.compat import version_of

MAX_OPS = 96
_GONE: weakref.ref[Tensor] = weakref.ref(torch.empty(0))
"""Of a result that nobody has held on to."""


@dataclass(frozen=True, slots=True)
class _Made:
    """An operand: the `output`-th result of the `number`-th operator, or (`of_root`) of the `number`-th module."""

    number: int
    output: int
    of_root: bool


@dataclass(frozen=True, slots=True)
class _Kept:
    """An operand: the `number`-th of the tensors kept of the step."""

    number: int


@dataclass(frozen=True, slots=True)
class _Op:
    func: Any
    args: Any
    kwargs: Any
    line: Line | None
    grad: bool
    floating: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a tensor is found that the step used: in the graph, from the loss along `path`; without one, the loss scale."""

    path: Path | None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The operators from the last module to the loss, as steps in a row have shown them."""

    modules: tuple[weakref.ref[nn.Module], ...]
    ops: tuple[_Op, ...]
    sources: tuple[_Source, ...]
    nodes: tuple[NodeSketch, ...]
    results: tuple[_Made, ...]
    """What is differentiated and, where it was scaled, the loss itself."""

    def rested(self, index: int, roots: list[RootCall], results: Sequence[Tensor], scale: Any) -> RestedGlue | None:
        """What is to be kept of a step whose operators were not taped. None where its graph is another one."""
        if len(roots) != len(self.modules) or len(results) != len(self.results):
            return None
        node = results[0].grad_fn
        kept: list[Held] = []
        for source in self.sources:
            tensor = scale if source.path is None else find(node, source.path, source.name)
            if not isinstance(tensor, Tensor):
                return None
            kept.append(Held(tensor, version_of(tensor)))
        outputs = [weakref.ref(tensor) for tensor in results]
        args = (kept, [Ref(root.index, 0) for root in roots])
        return RestedGlue(index, None, args, {}, None, True, None, outputs, [True], None, roots, node, kept, self)

    def operators(self, rested: RestedGlue) -> list[GlueOp] | None:
        """The operators of a step that was not taped. None where its modules or its graph are not those learnt."""
        roots = rested.roots
        if any(known() is not root.module for known, root in zip(self.modules, roots, strict=True)):
            return None
        if not is_alike(rested.node, self.nodes):
            return None

        made = {end.number: ref for end, ref in zip(self.results, rested.outputs, strict=True) if not end.of_root}

        def operand(leaf: Any) -> Any:
            if isinstance(leaf, _Kept):
                return rested.kept[leaf.number]
            if isinstance(leaf, _Made):
                return Ref(roots[leaf.number].index if leaf.of_root else rested.index + leaf.number, leaf.output)
            return leaf

        return [
            GlueOp(
                rested.index + number,
                op.func,
                _map(op.args, operand),
                _map(op.kwargs, operand),
                op.line,
                op.grad,
                None,
                [made.get(number, _GONE) if i == 0 else _GONE for i, _ in enumerate(op.floating)],
                list(op.floating),
            )
            for number, op in enumerate(self.ops)
        ]


def plan_of(events: Sequence[Event], results: Sequence[Ref | None], node: Any, scale: Any) -> Plan | None:
    """What can be learnt from the events of a taped step whose result, at `node` of the graph, is differentiated.

    None where such a step must be taped.
    """
    roots = [e for e in events if isinstance(e, RootCall)]
    if node is None or not roots or any(_is_opaque(e) for e in events):
        return None
    first, last = roots[0].index, roots[-1].index
    glue = [e for e in events if isinstance(e, GlueOp) and e.index > first]
    if any(op.index < last for op in glue) or any(result is None for result in results):
        return None
    targets = [result for result in results if result is not None]
    counts = {Ref(op.index, i): t for op in glue for i, t in _whole_numbers(op)}
    held = [h.tensor for op in glue for h in held_in((op.args, op.kwargs))]
    drawn = sketch(node, {id(n) for root in roots for n in root.nodes}, [*held, *counts.values()])
    if drawn is None:
        return None
    nodes, found = drawn
    given = {ref: found[id(t)] for ref, t in counts.items() if id(t) in found}
    ops = _behind(targets, glue, given)
    if len(ops) > MAX_OPS or any(not _is_plain(op) for op in ops):
        return None
    places = {e.index: (number, False) for number, e in enumerate(ops)}
    places |= {e.index: (number, True) for number, e in enumerate(roots)}
    sources: list[_Source] = []

    def operand(leaf: Any) -> Any:
        if isinstance(leaf, Ref) and leaf in given:
            sources.append(_Source(*given[leaf]))
            return _Kept(len(sources) - 1)
        if isinstance(leaf, Ref):
            return _Made(places[leaf.event][0], leaf.output, places[leaf.event][1])
        if isinstance(leaf, Held):
            where = None if leaf.tensor is scale else found[id(leaf.tensor)]
            sources.append(_Source(None) if where is None else _Source(*where))
            return _Kept(len(sources) - 1)
        return leaf

    try:
        made = tuple(
            _Op(op.func, _map(op.args, operand), _map(op.kwargs, operand), op.line, op.grad, tuple(op.floating))
            for op in ops
        )
        ends = tuple(operand(target) for target in targets)
    except KeyError:  # made by an event that is not one of these, or kept nowhere
        return None
    return Plan(tuple(weakref.ref(root.module) for root in roots), made, tuple(sources), nodes, ends)


def _behind(targets: Sequence[Ref], glue: list[GlueOp], given: Collection[Ref]) -> list[GlueOp]:
    """The operators from which the targets were made: others (an accuracy) need not be known."""
    wanted = {target.event for target in targets}
    for op in reversed(glue):
        if op.index in wanted:
            wanted |= {ref.event for ref in refs_in((op.args, op.kwargs)) if ref not in given}
    return [op for op in glue if op.index in wanted]


def _whole_numbers(op: GlueOp) -> list[tuple[int, Tensor]]:
    """Results that can hold no Inf or NaN (indices, masks): where they come from need not be known."""
    live = [(i, ref()) for i, (ref, is_float) in enumerate(zip(op.outputs, op.floating, strict=True)) if not is_float]
    return [(i, tensor) for i, tensor in live if tensor is not None]


def _is_opaque(event: Event) -> bool:
    if isinstance(event, RootCall):
        return event.is_function or bool(event.swapped_state)
    return isinstance(event, (BackwardCall, RestedGlue))


def _is_plain(op: GlueOp) -> bool:
    if op.rng is not None or op.error is not None:
        return False
    return not compat.positions_written(op.func) and not any(
        isinstance(leaf, HeldGenerator) for leaf in leaves((op.args, op.kwargs))
    )


def _map(tree: Any, visit: Callable[[Any], Any]) -> Any:
    if isinstance(tree, tuple):
        return tuple([_map(item, visit) for item in tree])
    if isinstance(tree, list):
        return [_map(item, visit) for item in tree]
    if isinstance(tree, dict):
        return {key: _map(item, visit) for key, item in tree.items()}
    return visit(tree)
