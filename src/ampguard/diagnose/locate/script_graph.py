"""Which operator of a TorchScript graph has the bad derivative.

TorchScript differentiates a graph as a whole: one node of autograd's stands for many operators, and does not say which of
them it is at. So each is differentiated by itself, on the operands that it had.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.root_calls.trees import map_tensors
from ampguard.numerics import is_finite
from ampguard.replay.operators import flat_tensors
from ampguard.replay.rebuild import Replayer
from ampguard.replay.trace import TracedOp
from ampguard.replay.variants import Captured, Variant

SAVED = frozenset({"detach"})
"""What such a node begins with: the tensors that it saves. These have no derivative of their own."""

LONGEST = 256
"""Operators of a graph, up to which they are all captured."""


def begins_graph(forward: TracedOp) -> bool:
    """Whether an operator of the forward pass, to which a node's number leads, is no operator that has a derivative."""
    return forward.short_name in SAVED


def singular_inside(ops: list[TracedOp], first: TracedOp, replayer: Replayer | None) -> TracedOp | None:
    """The last operator of the graph whose own derivative is not finite. One replay."""
    inside = [
        op
        for op in ops[first.index :]
        if not op.in_backward and op.event == first.event and (op.line, op.module) == (first.line, first.module)
    ]
    inside = [op for op in inside if not begins_graph(op)]
    if replayer is None or not inside or len(inside) > LONGEST:
        return None
    captured = replayer.run(Variant(capture=frozenset(op.index for op in inside)), traced=False).captured
    calls = ((op, captured.get(op.index)) for op in reversed(inside))
    return next((op for op, call in calls if call is not None and _has_bad_derivative(call)), None)


def _has_bad_derivative(call: Captured) -> bool:
    """Whether finite operands have a derivative that is not finite."""
    if compat.positions_written(call.func) or not all(is_finite(t) for t in call.tensors):
        return False
    args, kwargs = map_tensors((call.args, call.kwargs), _as_leaf)
    leaves = [t for t in flat_tensors(args, kwargs) if t.requires_grad]
    try:
        with torch.enable_grad():
            output = call.func(*args, **kwargs)
            results = output if isinstance(output, (tuple, list)) else [output]
            sums = [r.sum() for r in results if isinstance(r, Tensor) and r.requires_grad]
        gradients = torch.autograd.grad(sums, leaves, allow_unused=True) if sums and leaves else ()
    except RuntimeError:  # it has none (it was not implemented)
        return False
    return not all(gradient is None or is_finite(gradient) for gradient in gradients)


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())
