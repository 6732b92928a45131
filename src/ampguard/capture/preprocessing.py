"""What a script computes before the first module of a step: is any of it worth taping?

Batches that are only sliced, joined, converted and moved to a device cannot become non-finite there: a bad value was in
the data. Arithmetic can, and so can a conversion to a narrower type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampguard.capture.record import Event, GlueOp, leaves, refs_of

MOVES = frozenset({
    "__get__", "__getitem__", "_to_copy", "_unsafe_view", "alias", "as_strided", "atleast_1d", "atleast_2d",
    "atleast_3d", "broadcast_to", "cat", "chunk", "clone", "concat", "concatenate", "contiguous", "cpu", "cuda",
    "detach", "diagonal", "expand", "expand_as", "flatten", "flip", "gather", "index", "index_select", "lift_fresh",
    "long", "movedim", "narrow", "permute", "pin_memory", "ravel", "repeat", "repeat_interleave", "reshape",
    "reshape_as", "roll", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "swapaxes", "swapdims",
    "t", "tile", "to", "transpose", "tril", "triu", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as",
})  # fmt: skip
"""Functions and operators whose results hold nothing but values that they were given."""


def uses_computed(events: list[Event], began: int, first_root: int) -> bool:
    """Whether any event from `first_root` on was given what those from `began` on had computed, not just moved."""
    if not any(began <= event.index < first_root and not only_moves(event) for event in events):
        return False
    later = (event for event in events if event.index >= first_root)
    return any(began <= ref.event < first_root for event in later for ref in refs_of(event))


def only_moves(event: Event) -> bool:
    """Whether what an event returned holds no other values than it was given, in no narrower type."""
    if not isinstance(event, GlueOp):
        return False
    func: Any = getattr(event.func, "overloadpacket", event.func)
    if getattr(func, "__name__", "") not in MOVES:
        return False
    given = list(leaves((event.args, event.kwargs)))
    return not any(isinstance(value, (torch.dtype, Tensor)) for value in given)
