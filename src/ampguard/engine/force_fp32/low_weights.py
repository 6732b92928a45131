"""A module in float32 whose own weights are low (`model.half()`): its calls run on float32 casts of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ampguard.numerics import is_low_precision


def low_weights_of(module: nn.Module) -> torch.dtype | None:
    """The type of the first parameter in a low precision."""
    for parameter in module.parameters():  # a compiler traces this
        if is_low_precision(parameter.dtype):
            return parameter.dtype
    return None


@contextlib.contextmanager
def on_float32_casts(module: nn.Module) -> Iterator[None]:
    """Inside, float32 casts stand where the module's low weights and buffers do. Gradients arrive at the weights."""
    from ampguard.engine.precision.stand_ins import StandIns, places_in  # it asks which modules are forced

    places = [place for place in places_in(module) if is_low_precision(place.tensor.dtype)]
    casts = {id(place.tensor): place.tensor.float() for place in places}  # one for tied weights
    standing_in = StandIns(module, [(place, casts[id(place.tensor)]) for place in places])
    standing_in.enter()
    try:
        yield
    finally:
        standing_in.leave()
