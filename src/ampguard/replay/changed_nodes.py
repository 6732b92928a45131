"""The derivative of an operator that a fix changed: that of the changed code, and not that of what ran before.

A replay changes operators below autograd, which has noted the operator as it was: a clamped operand would be
differentiated as if nothing bounded it, a variance with another `correction` by the old one. So what the node of such an
operator computes is replaced, when the backward pass comes to it, by the derivative of the change itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.root_calls.trees import map_tensors
from ampguard.replay.operators import facts_of, flat_tensors


@dataclass(frozen=True, slots=True)
class _Changed:
    """An operator that was run with a change, and what autograd will have made of it."""

    run: Callable[..., Any]
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Tensor]
    """Tensors that the derivative is asked for: those of `args` and `kwargs`, or what stands for them."""
    edges: list[tuple[Any, int]]
    """Where each operand's gradient goes: as the node's `next_functions` have it."""
    outputs: list[Tensor]
    number: int
    view: Tensor | None = None
    """What it writes to, where that is a view: autograd notes it at the base then, with a node of its own kind."""
    written: int | None = None
    """Which of `operands` that is, if any."""


class ChangedNodes:
    """The nodes of the graph whose operators a fix has changed."""

    def __init__(self) -> None:
        self.are_known = True
        """False where the derivative of a change could not be put in its place."""
        self.is_busy = False
        """Whether a change is being differentiated: what runs then is no part of the step."""
        self._waiting: list[_Changed] = []

    def is_needed(self, args: Any, kwargs: Any) -> bool:
        """Whether autograd takes note of the operator that is about to run."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in flat_tensors(args, kwargs))

    def before(self, run: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> _Changed:
        """An operator that `run` is about to run in its changed form. What it writes to is kept as it is now."""
        number = compat.next_node_number() - 1
        operands = [t for t in flat_tensors(args, kwargs) if t.requires_grad]
        edges = [_edge(t) for t in operands]
        facts = facts_of(func)
        written = args[facts.writes[0]] if facts.writes and facts.writes[0] < len(args) else None
        view = written if isinstance(written, Tensor) and compat.base_of(written) is not None else None
        own = next((i for i, t in enumerate(operands) if t is written), None)
        if facts.writes or facts.hidden_writes:
            kept = {id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in flat_tensors(args, kwargs)}
            args, kwargs = (map_tensors(value, lambda t: kept[id(t)]) for value in (args, kwargs))
            operands = [kept[id(t)] for t in operands]
        return _Changed(run, func, tuple(args), kwargs, operands, edges, [], number, view, own)

    def after(self, changed: _Changed, output: Any) -> None:
        """It has run; autograd gives its results their node when we have returned them."""
        changed.outputs.extend(flat_tensors((output,), {}))
        self._waiting.append(changed)

    def settle(self) -> None:
        """By now the operators that have run have their nodes."""
        while self._waiting:
            changed = self._waiting.pop()
            base = compat.base_of(changed.view) if changed.view is not None else None
            results = changed.outputs if base is None else [base]
            node = next((t.grad_fn for t in results if t.grad_fn is not None), None)
            if node is None or not _is_of(node, changed):
                self.are_known = False
                continue
            node.register_hook(self._derivative_of(changed, node))

    def _derivative_of(self, changed: _Changed, node: Any) -> Callable[[Any, Any], Any]:
        wanted = list(node.next_functions)

        def derivative(grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> Any:
            try:
                self.is_busy = True
                if changed.view is not None:
                    return _through_view(changed, changed.view, wanted, grad_inputs, grad_outputs[0])
                found = _differentiated(changed, grad_outputs)
                return _in_order(changed.edges, found, wanted, grad_inputs)
            except Exception:
                self.are_known = False
                return None
            finally:
                self.is_busy = False

        return derivative


def _is_of(node: Any, changed: _Changed) -> bool:
    """Whether it is the operator's own node, or that of the base of a view which it has written to."""
    if changed.view is not None:
        return str(node.name()).endswith("CopySlices")
    name = facts_of(changed.func).name.replace("_", "")
    return compat.node_number(node) == changed.number or str(node.name()).lower().startswith(name.lower())


def _edge(tensor: Tensor) -> tuple[Any, int]:
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    return tensor, 0


def _differentiated(changed: _Changed, grad_outputs: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The gradients of the operands of an operator as it was changed.

    A change that reaches over several operators knows its own derivative: `derivative(args, kwargs, gradient)` gives that
    of the first argument.
    """
    further = torch.is_grad_enabled()  # where this derivative is to be differentiated in its turn
    own = getattr(changed.run, "derivative", None)
    if own is not None and not further:
        with torch.enable_grad():
            gradient = own(changed.func, changed.args, changed.kwargs, grad_outputs[0])
        return [gradient if t is changed.args[0] else None for t in changed.operands]
    with torch.enable_grad():
        # Cut off from each other: one operand may have been made of another.
        leaves = {id(t): t.view_as(t) if further else t.detach().requires_grad_() for t in changed.operands}
        writes = facts_of(changed.func).writes or facts_of(changed.func).hidden_writes

        def stand_in(tensor: Tensor) -> Tensor:
            leaf = leaves.get(id(tensor), tensor)
            return leaf.clone() if writes else leaf  # (a leaf cannot be written to)

        args, kwargs = map_tensors(changed.args, stand_in), map_tensors(changed.kwargs, stand_in)
        kept = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)
        with kept if writes else contextlib.nullcontext():  # what is overwritten at the end was read before
            made = flat_tensors((changed.run(changed.func, args, kwargs),), {})
    pairs = [(m, g) for m, g in zip(made, grad_outputs, strict=False) if g is not None and m.requires_grad]
    if not pairs:
        return [None for _ in changed.operands]
    found = torch.autograd.grad(
        [m for m, _ in pairs],
        list(leaves.values()),
        [g.to(m.dtype) for m, g in pairs],
        allow_unused=True,
        create_graph=further,
    )
    by_leaf = dict(zip(leaves, found, strict=True))
    return [by_leaf.pop(id(t), None) for t in changed.operands]  # (of `x * x` all of it goes to the first)


def _through_view(
    changed: _Changed, view: Tensor, wanted: list[Any], old: tuple[Tensor | None, ...], gradient: Tensor | None
) -> Any:
    """What `CopySlices` computes: the base's gradient with the part behind the view replaced, and those of other operands."""
    base = compat.base_of(view)
    if gradient is None or base is None:
        return None
    whole = torch.empty_strided(base.shape, base.stride(), dtype=gradient.dtype, device=gradient.device)
    whole.copy_(gradient)
    part = whole.as_strided(view.shape, view.stride(), view.storage_offset() - base.storage_offset())
    found = _differentiated(changed, (part.clone(),))
    own = changed.written
    gradient_of_part = found[own] if own is not None else None
    part.copy_(gradient_of_part if gradient_of_part is not None else torch.zeros_like(part))
    others = [pair for i, pair in enumerate(zip(changed.edges, found, strict=True)) if i != own]
    rest = _in_order([edge for edge, _ in others], [g for _, g in others], wanted[1:], old[1:])
    return (whole if old[0] is not None else None, *rest)


def _in_order(
    edges: list[tuple[Any, int]], found: list[Tensor | None], wanted: list[Any], old: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients as the node hands them on: one for each of `wanted`."""
    left = list(zip(edges, found, strict=True))
    placed: list[Tensor | None] = []
    for (function, number), before in zip(wanted, old, strict=True):
        if function is None:
            placed.append(None)
            continue
        position = next((i for i, (edge, _) in enumerate(left) if _leads_to(edge, function, number)), None)
        if position is None:
            raise LookupError("an edge of the node that no operand has")
        gradient = left.pop(position)[1]
        if gradient is not None and before is not None and gradient.dtype != before.dtype:
            gradient = gradient.to(before.dtype)
        placed.append(gradient if gradient is not None or before is None else torch.zeros_like(before))
    return tuple(placed)


def _leads_to(edge: tuple[Any, int], function: Any, number: int) -> bool:
    origin, output = edge
    if isinstance(origin, Tensor):
        return getattr(function, "variable", None) is origin
    return origin is function and output == number
