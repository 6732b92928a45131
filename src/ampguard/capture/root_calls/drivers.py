"""Modules whose forward is a training step: it differentiates, clips and steps (Lightning's manual optimisation under DDP).

What such a module computes is no forward pass to be recorded as one call. Once it was seen to scale a loss or to step an
optimizer, its calls are passed through, and the modules that it calls are recorded in its place, as those of any function
of the script's. (A derivative alone, of an energy by its input, say, is a part of the forward pass.)
"""

from __future__ import annotations

import weakref
from types import FrameType

from torch import nn

from ampguard import compat
from ampguard.capture.frames import locals_of

DEEPEST = 200
"""Frames that are looked at."""


class Drivers:
    """Those that are known by now."""

    def __init__(self) -> None:
        self.known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.has_any = False
        """Asked in every call of a module outside others."""

    def trains(self, frame: FrameType | None) -> None:
        """A loss is scaled or an optimizer stepped below `frame`, inside a module's call: all modules on the stack drive it."""
        if compat.in_backward():
            return  # an optimizer that steps in backward
        for _ in range(DEEPEST):
            if frame is None:
                return
            if compat.is_call_of_module(frame.f_code):
                module = locals_of(frame).get("self")
                if isinstance(module, nn.Module):
                    self.known.add(module)
                    self.has_any = True
            frame = frame.f_back
