"""Holding a step off on all ranks or on none: a rank whose loss is bad says so through its gradients.

A rank that held its step off alone would go on with other weights than the others, and where shards are reduced it would
stay away from a collective. So the bad loss is differentiated with a gradient of NaN: the average over ranks is NaN on
every one of them, and each holds off the same step by what it sees itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.numerics import is_finite

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of `torch.autograd.backward` after the tensors, by position and by name."""


def carry_bad_losses(losses: tuple[Tensor, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The arguments with which differentiating a bad loss leaves bad gradients on every rank."""
    bad = [compat.has_values(loss) and not is_finite(loss) for loss in losses]
    if not any(bad):
        return args, kwargs
    given = args[0] if args else kwargs.get("grad_tensors")
    before = [None] * len(losses) if given is None else [given] if isinstance(given, Tensor) else list(given)
    begin = tuple(_begin(*each) for each in zip(losses, before, bad, strict=True))
    return ((begin, *args[1:]), kwargs) if args else (args, {**kwargs, "grad_tensors": begin})


def _begin(loss: Tensor, given: Tensor | None, is_bad: bool) -> Tensor | None:
    return torch.full_like(loss, float("nan")).detach() if is_bad else given
