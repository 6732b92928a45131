"""Where layers were put into models while optimizers were there already: the line to blame if nobody holds their weights."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch import Tensor, nn

from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.record import Line

MOST = 1024
"""Layers that are remembered: the last ones. What is replaced in the middle of a run was told of long before."""


class PutIn:
    """Hears of every module that becomes a part of another one."""

    def __init__(self, is_wanted: Callable[[], Any]) -> None:
        self._is_wanted = is_wanted
        self._put: deque[tuple[weakref.ref[nn.Module], Line | None]] = deque(maxlen=MOST)

    def registered(self, module: nn.Module | None, frame: FrameType) -> None:
        """A module is about to become a part of another one."""
        if module is not None and self._is_wanted():
            self._put.append((weakref.ref(module), script_line(frame)))

    def line_of(self, parameters: Iterable[Tensor]) -> Line | None:
        """Where the last of those modules that hold any of these was put in its place: what they hang in altogether."""
        wanted = set(map(id, parameters))
        for ref, line in reversed(self._put):
            module = ref()
            if module is not None and any(id(p) in wanted for p in module.parameters()):
                return line
        return None
