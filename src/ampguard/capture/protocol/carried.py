"""Does a loss go on from gradients that an earlier, scaled backward pass has left outside the optimizers?

Representations are computed without a graph, their gradients taken, and `(model(chunk) * gradient).sum()` differentiated
part by part: such a loss carries the scale although nobody has scaled it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from ampguard import compat
from ampguard.capture.frames import locals_of
from ampguard.capture.protocol.loss_scale import MAX_NODES, is_linear
from ampguard.capture.protocol.script_lines import is_script_code

_FACTORS = ("self", "other", "tensor", "mat2", "vec")
_PRODUCTS = frozenset({"MulBackward0", "DotBackward0", "MvBackward0", "BmmBackward0", "MmBackward0"})


def goes_on_in(loss: Any, is_lost: bool) -> bool:
    """Whether a factor of the loss is such a gradient.

    `is_lost`: a scaled backward pass of this iteration has reached no optimizer at all. What it was for is a tensor of the
    script's, and a constant factor is enough. Else the factor has to be part of the gradient of a leaf that the script holds.
    """
    if not isinstance(loss, Tensor):
        return False
    with compat.unseen():
        factors = list(_constant_factors(loss.grad_fn))
        if not factors or is_lost:
            return bool(factors)
        memory = {compat.storage_key(factor) for factor in factors} - {0}
        return any(compat.storage_key(grad) in memory for grad in _gradients_of_leaves())


def _constant_factors(start: Any) -> Iterator[Tensor]:
    """The tensors of several elements that a loss is linear in without being differentiated for them."""
    stack, seen = [start], dict[int, Any]()
    while stack and len(seen) < MAX_NODES:
        node = stack.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        is_product = type(node).__name__ in _PRODUCTS and any(inner is None for inner, _ in node.next_functions)
        saved = [compat.saved_by(node, name) for name in _FACTORS] if is_product else []
        factors = [factor for factor in saved if factor is not None and not factor.requires_grad and factor.numel() > 1]
        yield from factors
        if not factors and is_linear(node):
            stack += [inner for inner, _ in node.next_functions]


def _gradients_of_leaves() -> Iterator[Tensor]:
    """Of tensors that a name of the script on the stack refers to, or a list of such a name. (No parameters of modules.)"""
    frame = sys._getframe(1)
    while frame is not None:
        if is_script_code(frame.f_code):
            for value in list(locals_of(frame).values()):
                for tensor in _tensors(value):
                    if tensor.requires_grad and tensor.is_leaf and tensor.grad is not None:
                        yield tensor.grad
        frame = frame.f_back  # type: ignore[assignment]


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, dict):
        value = list(value.values())
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, (list, tuple)) else ()
