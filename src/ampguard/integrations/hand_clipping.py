"""Clipping by hand of gradients that carry the loss scale, in frameworks that have a call of their own for it."""

from __future__ import annotations

import logging

from ampguard.engine.holding import Holding

logger = logging.getLogger("ampguard")


def tell_of_writes(holding: Holding, scale: float, do: str) -> None:
    """Once per optimizer, that somebody has changed its gradients before they were divided; `do`: how to clip instead.

    Not where there is no scale to speak of, nor of gradients that were only cleared.
    """
    if holding.foreign_writes_told or scale == 1.0 or not holding.has_nonzero_gradients():
        return
    holding.foreign_writes_told = True
    logger.warning(
        "the gradients of `%s` were changed by something else after the backward pass, while they carry the loss scale %g. "
        "Where that was clipping, it has clipped too much: %s.",
        holding.name,
        scale,
        do,
    )
