"""What `torch.jit.script` and `torch.jit.trace` make of a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

SCRIPTED: type | None = getattr(torch.jit, "ScriptFunction", None)

_ACTING = frozenset({"prim::Print", "prim::PythonOp", "prim::SetAttr", "prim::CallMethod"})
"""What does something beside computing."""


def is_scripted(function: Any) -> bool:
    return SCRIPTED is not None and isinstance(function, SCRIPTED)


def only_computes(function: Any) -> bool:
    """Whether a scripted function neither writes to a tensor or a list, nor draws random numbers, nor calls Python."""
    return all(_computes(node) for node in _nodes(function.inlined_graph))


def operator_by_operator(function: Any) -> Callable[..., Any]:
    """The same function without the executor's own derivatives, which keep its operators from autograd.

    An executor that has optimised a graph once keeps to that: this is a copy.
    """
    copied = torch._C._create_function_from_graph("again", function.graph.copy())
    arguments = function.schema.arguments

    def run(*args: Any, **kwargs: Any) -> Any:
        rest = (kwargs.get(a.name, a.default_value) for a in arguments[len(args) :])
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            return copied(*args, *rest)

    return run


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _computes(node: Any) -> bool:
    kind = str(node.kind())
    if kind.startswith("prim::"):
        return kind not in _ACTING
    return kind.startswith("aten::") and not node.isNondeterministic() and "!" not in node.schema()
