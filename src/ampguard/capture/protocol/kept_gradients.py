"""Copies of true gradients that a script keeps from one backward pass to a later one.

`reference = [p.grad.clone() for p in ...]` behind a loss that was not scaled, added to gradients that are: the scaler divides
the sum, and the reference counts 65536 times less than it was meant to (rehearsal, corrections of the variance).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor

from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.powers import Powers
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.record import Line
from ampguard.compat import version_of

COPIES = frozenset({"clone", "detach", "to", "float", "double"})
MOST = 512

Kept = tuple["weakref.ref[Tensor]", int, OptimizerWatch, "Line | None"]


@dataclass(slots=True)
class KeptGradients:
    """Those of the last window in which some were made."""

    _kept: list[Kept] = field(default_factory=list)
    _made: list[Kept] = field(default_factory=list)

    def copied(self, name: str, args: tuple[Any, ...], result: Any, powers: Powers, frame: FrameType) -> None:
        """The script has called an operator: on a gradient as it is, of a loss that was not scaled?"""
        held = powers.gradient(args[0]) if name in COPIES and len(self._made) < MOST else None
        is_copy = held is not None and not held.power and isinstance(result, Tensor) and powers.gradient(result) is None
        if held is not None and is_copy and result.numel() == held.numel:
            self._made.append((weakref.ref(result), version_of(result), held.watch, script_line(frame)))

    def window_closes(self) -> None:
        if self._made:
            self._kept, self._made = self._made, []

    def window_opens(self, powers: Powers) -> None:
        """What nobody has written to since is still a true gradient."""
        for ref, version, watch, where in self._kept:
            tensor = ref()
            if tensor is not None and version_of(tensor) == version:
                powers.note(tensor, 0.0, watch, where)
