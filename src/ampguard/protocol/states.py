"""The stages of an optimizer's gradients, and which move leads from which stage to which.

A move that is not in the table breaks the protocol; `BREACHES` names the cause.
"""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    """What an optimizer's gradients are."""

    EMPTY = "none, or unknown"
    PLAIN = "true gradients, of a loss that was not scaled"
    SCALED = "multiplied by the loss scale"
    MIXED = "a sum of scaled and unscaled ones"
    UNSCALED = "true gradients again"
    REOPENED = "unscaled ones, to which scaled ones were added"
    USED = "left over from a step"

    is_open: bool
    """Gradients of a scaled loss, with which nobody has stepped yet."""
    is_scaled: bool
    """The loss scale is still in them."""

    def __init__(self, _: str) -> None:
        self.is_open = self.name in ("SCALED", "MIXED", "REOPENED", "UNSCALED")
        self.is_scaled = self.name in ("SCALED", "MIXED", "REOPENED")


class Move(Enum):
    """What can happen to them."""

    BACKWARD_SCALED = "backward of a scaled loss"
    BACKWARD_PLAIN = "backward of a loss that was not scaled"
    UNSCALE = "the scaler unscales"
    RESCALE = "a scaler multiplies by its scale again"
    CLIP = "clipping, or reading a norm"
    STEP = "the scaler steps"
    DIRECT_STEP = "the optimizer steps without the scaler"
    CLEAR = "zero_grad"


_S, _M = Stage, Move

MOVES: dict[tuple[Stage, Move], Stage] = {
    (_S.EMPTY, _M.BACKWARD_SCALED): _S.SCALED,
    (_S.EMPTY, _M.BACKWARD_PLAIN): _S.PLAIN,
    (_S.EMPTY, _M.UNSCALE): _S.EMPTY,
    (_S.EMPTY, _M.CLIP): _S.EMPTY,
    (_S.EMPTY, _M.STEP): _S.EMPTY,
    (_S.EMPTY, _M.DIRECT_STEP): _S.EMPTY,
    (_S.PLAIN, _M.BACKWARD_PLAIN): _S.PLAIN,
    (_S.PLAIN, _M.BACKWARD_SCALED): _S.MIXED,
    (_S.PLAIN, _M.CLIP): _S.PLAIN,
    (_S.PLAIN, _M.DIRECT_STEP): _S.USED,
    (_S.SCALED, _M.BACKWARD_SCALED): _S.SCALED,
    (_S.SCALED, _M.BACKWARD_PLAIN): _S.MIXED,
    (_S.SCALED, _M.UNSCALE): _S.UNSCALED,
    (_S.MIXED, _M.BACKWARD_SCALED): _S.MIXED,
    (_S.MIXED, _M.BACKWARD_PLAIN): _S.MIXED,
    (_S.UNSCALED, _M.BACKWARD_PLAIN): _S.UNSCALED,
    (_S.UNSCALED, _M.BACKWARD_SCALED): _S.REOPENED,
    (_S.UNSCALED, _M.CLIP): _S.UNSCALED,
    (_S.UNSCALED, _M.STEP): _S.USED,
    (_S.UNSCALED, _M.DIRECT_STEP): _S.USED,
    (_S.REOPENED, _M.BACKWARD_SCALED): _S.REOPENED,
    (_S.REOPENED, _M.BACKWARD_PLAIN): _S.REOPENED,
    (_S.USED, _M.BACKWARD_SCALED): _S.SCALED,
    (_S.USED, _M.BACKWARD_PLAIN): _S.PLAIN,
    (_S.USED, _M.CLIP): _S.USED,
    (_S.USED, _M.DIRECT_STEP): _S.USED,
    (_S.USED, _M.STEP): _S.USED,
    (_S.USED, _M.UNSCALE): _S.USED,
    **{(stage, _M.RESCALE): stage for stage in Stage},
    (_S.UNSCALED, _M.RESCALE): _S.SCALED,
    **{(stage, _M.CLEAR): _S.EMPTY for stage in Stage},
}
"""Allowed moves. (A step that unscales by itself is two moves: UNSCALE, STEP.)"""

BREACHES: dict[tuple[Stage, Move], tuple[str, Stage]] = {
    (_S.PLAIN, _M.UNSCALE): ("unscaled-backward", _S.UNSCALED),
    (_S.PLAIN, _M.STEP): ("unscaled-backward", _S.USED),
    (_S.SCALED, _M.CLIP): ("clip-before-unscale", _S.SCALED),
    (_S.SCALED, _M.STEP): ("missing-update", _S.USED),
    (_S.SCALED, _M.DIRECT_STEP): ("bypassed-scaler", _S.USED),
    (_S.MIXED, _M.UNSCALE): ("unscaled-backward", _S.UNSCALED),
    (_S.MIXED, _M.CLIP): ("clip-before-unscale", _S.MIXED),
    (_S.MIXED, _M.STEP): ("unscaled-backward", _S.USED),
    (_S.MIXED, _M.DIRECT_STEP): ("bypassed-scaler", _S.USED),
    (_S.UNSCALED, _M.UNSCALE): ("double-unscale", _S.UNSCALED),
    (_S.REOPENED, _M.UNSCALE): ("accumulation-broken", _S.UNSCALED),
    (_S.REOPENED, _M.CLIP): ("accumulation-broken", _S.REOPENED),
    (_S.REOPENED, _M.STEP): ("accumulation-broken", _S.USED),
    (_S.REOPENED, _M.DIRECT_STEP): ("accumulation-broken", _S.USED),
}
"""Moves that break the protocol: the cause, and the stage after them."""
