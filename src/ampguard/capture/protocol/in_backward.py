"""Optimizers that step in hooks, while the backward pass still runs (`register_post_accumulate_grad_hook`).

What is called within a backward pass is not followed call by call. In passes that are looked at closely, a parameter's
gradient is seen as it arrives: where an optimizer steps with that very gradient, it carries the scale of the loss. One that
was made smaller in between may have been divided and then clipped, if it is no larger than the true gradient: nothing is
said of it. One that is larger was clipped with the scale in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.protocol.leaf_hooks import shrunk_by
from ampguard.capture.protocol.loss_scale import DeviceScale
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.protocol.watches import ScalerWatch
from ampguard.capture.record import Line
from ampguard.protocol.events import Breach

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Frame, Moves

STILL_SCALED = 1.5
"""Times the true gradient: what is larger was not divided by the scale."""


class StepsInBackward:
    """Knows the scale of the pass that runs, and tells of those who step with what it has brought."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._scale: DeviceScale | None = None
        self._where: Line | None = None

    @property
    def is_open(self) -> bool:
        """Whether a backward pass of a scaled loss runs that is looked at closely."""
        return self._scale is not None and compat.in_backward()

    def begins(self, scale: DeviceScale, frame: Frame) -> None:
        """`scale` has multiplied its loss. One of ours is divided out again before any hook sees it."""
        of = scale.watch
        is_scripts = isinstance(of, ScalerWatch) and isinstance(of.ref(), compat.GRAD_SCALER)
        self._scale, self._where = (scale, script_line(frame)) if is_scripts else (None, None)

    def ends(self) -> None:
        """The pass has returned."""
        self._scale = None

    def stepping(self, optimizer: Optimizer, frame: Frame) -> None:
        """An optimizer steps in it, and no scaler lets it."""
        moves, scale = self._moves, self._scale
        watch = moves.watches.by_id.get(id(optimizer))
        if scale is None or watch is None or float(scale) <= 1.0 or compat.unscales_as_it_steps(optimizer):
            return
        for parameter, arrived in moves.close.arrived(watch, float(scale)):
            with torch.no_grad(), compat.unseen():
                left = _left_of(arrived, parameter.grad)
            if left is not None and left * float(scale) >= STILL_SCALED:
                facts = {"scale": float(scale), "in_backward": True, "clipped_by": left if left < 1.0 else None}
                carried = left * float(scale)
                breach = Breach("bypassed-scaler", watch, None, self._where, script_line(frame), carried, facts)
                moves.tell([breach], moves.recorder.steps.count)
                return


def _left_of(arrived: Tensor, gradient: Tensor | None) -> float | None:
    """The factor by which the script has made a gradient smaller (1: it is as it came); None where it did something else."""
    if gradient is None or not bool(arrived.any()):
        return None
    return 1.0 if torch.equal(gradient, arrived) else shrunk_by(arrived, gradient)
