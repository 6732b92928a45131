"""Gradients that `torch.autograd.grad` has returned, clipped by a limit for true ones while they carry the scale (DP-SGD).

Each sample's are bounded and summed up, and only the sum goes into `.grad`. Their powers of the scale are followed by
themselves: what else a script does with such gradients (surgery, penalties) is looked at where it is put in place or
becomes part of a loss. Here only a factor counts that comes out of a limit which carries no scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import Tensor

from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.powers import OVER, TIMES, Powers, first_of
from ampguard.capture.protocol.read_verdicts import Clip
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.protocol.script_names import spots_of
from ampguard.capture.protocol.script_units import computes_with_scale
from ampguard.capture.record import Line

MOST = 4096
"""Tensors that are followed in a window."""
MOST_CLIPS = 256


class ClippedSamples:
    """Those of one window."""

    def __init__(self, scale: float) -> None:
        self._powers = Powers(scale)
        self._taken_at: Line | None = None
        self.clips: list[Clip] = []

    def taken(self, gradients: Iterable[tuple[Tensor, OptimizerWatch]], where: Line | None) -> None:
        """Gradients of a scaled loss were returned at this line."""
        self._taken_at = where
        for gradient, watch in gradients:
            self._powers.note(gradient, 1.0, watch, where, made_of=(gradient,))

    def called(self, name: str, args: tuple[Any, ...], options: dict[str, Any], result: Any, frame: FrameType) -> None:
        """The script has called an operator, maybe of them."""
        powers = self._powers
        if not 0 < len(powers.known) < MOST or len(self.clips) >= MOST_CLIPS:
            return
        carried = powers.result(name, args)
        if carried is None:
            return
        if name in TIMES | OVER and len(args) > 1:
            self._multiplied(name, args[0], args[1], frame)
            if name in TIMES:
                self._multiplied(name, args[1], args[0], frame)
        is_limited = powers.is_limited(name, args, options, carried[0])
        powers.note(result, *carried, script_line(frame), is_limited, args)

    def _multiplied(self, name: str, gradients: Any, factor: Any, frame: FrameType) -> None:
        """Is this a clip: gradients that carry the scale times a factor that was limited?"""
        of, by = self._powers.quantity(first_of(gradients)), self._powers.quantity(factor)
        if of is None or by is None or of.is_reduced or of.power != 1.0 or not by.is_limited:
            return
        if not any(map(computes_with_scale, spots_of(frame, self._powers.scale))):
            where = script_line(frame)
            clip = Clip(of.watch, factor, by.power, where, name in OVER, is_limited=True, taken_at=self._taken_at)
            self.clips.append(clip)
