"""Operators, the autograd graph, and trees of operands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree

_current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)

_next_sequence_number: Callable[[], int] | None = getattr(
    getattr(torch._C, "_autograd", None), "_get_sequence_nr", None
)


def next_node_number() -> int:
    """The number that autograd will give to the next node of this thread; 0 where it does not say."""
    return int(_next_sequence_number()) if _next_sequence_number is not None else 0


def running_node_number() -> int | None:
    """Inside a backward pass: the number of the node whose derivative is being computed, as given in the forward pass."""
    node = _current_node() if _current_node is not None else None
    if node is None or not hasattr(node, "_sequence_nr"):
        return None
    return int(node._sequence_nr())


def node_number(node: Any) -> int | None:
    """The number that a node of the graph was given in the forward pass."""
    return int(node._sequence_nr()) if hasattr(node, "_sequence_nr") else None


def functional_gradient() -> tuple[Any, str] | None:
    """What `torch.func.grad` and `grad_and_value` both call, with (func, argnums, has_aux, args, kwargs)."""
    module = sys.modules.get("torch._functorch.eager_transforms")
    return (module, "grad_and_value_impl") if hasattr(module, "grad_and_value_impl") else None


def schema_of(func: Any) -> Any:
    """An operator's declaration: its name, arguments and results, with what it writes to or shares."""
    return func._schema


def positions_written(func: Any) -> frozenset[int]:
    """Positions of the arguments that an operator writes to."""
    declared = enumerate(schema_of(func).arguments)
    return frozenset(i for i, argument in declared if argument.alias_info is not None and argument.alias_info.is_write)


def tree_leaves(tree: Any) -> list[Any]:
    """Everything in nested containers that is no container, as PyTorch's transforms see it."""
    return list(torch.utils._pytree.tree_leaves(tree))


def tree_map(visit: Callable[[Any], Any], tree: Any) -> Any:
    """Nested containers with `visit` applied to everything in them that is no container."""
    return torch.utils._pytree.tree_map(visit, tree)


def backward_engine() -> tuple[Any, str] | None:
    """Where `torch.autograd.backward` and `grad` look up the call that runs a backward pass."""
    return (torch.autograd, "_engine_run_backward") if hasattr(torch.autograd, "_engine_run_backward") else None
