"""Where layers and weights were put into models while optimizers were there already: the line to blame if nobody holds them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.frames import locals_of
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.record import Line

MOST = 1024
"""Of these are remembered: the last ones. What is replaced in the middle of a run was told of long before."""


class PutIn:
    """Hears of every module and every parameter that becomes a part of a module, and of modules that are copied or loaded.

    What a module's constructor puts into it is there because somebody has made that module: the line is the one that did.
    """

    def __init__(self, is_wanted: Callable[[], Any]) -> None:
        self._is_wanted = is_wanted
        self._put: deque[tuple[weakref.ref[nn.Module | Tensor], Line | None]] = deque(maxlen=MOST)

    def registered(self, part: nn.Module | Tensor | None, frame: FrameType) -> None:
        """It is about to become a part of a module, or was copied or loaded as a whole."""
        if part is not None and self._is_wanted():
            self._put.append((weakref.ref(part), script_line(_outside_constructors(frame))))

    def line_of(self, parameters: Iterable[Tensor]) -> Line | None:
        """Where the first of these, or of the modules that hold any of them, was put in its place; parts of others are not
        asked, which came into those before."""
        wanted = set(map(id, parameters))
        inside: set[int] = set()
        first: Line | None = None
        for ref, line in reversed(self._put):
            part = ref()
            held = [part] if part is not None else []
            if isinstance(part, nn.Module):
                held = [*compat.all_modules(part), *compat.all_parameters(part)]
            if id(part) not in inside and any(id(p) in wanted for p in held):
                first = line
                inside |= set(map(id, held))
        return first


def _outside_constructors(frame: FrameType) -> FrameType:
    """The frame that has called the outermost of the modules' constructors in which this one runs; itself outside of them."""
    outermost, current = frame, frame.f_back
    while current is not None:
        code = current.f_code
        if code.co_name == "__init__" and code.co_argcount:
            made = locals_of(current).get(code.co_varnames[0])
            if isinstance(made, nn.Module):
                outermost = current.f_back or current
        current = current.f_back
    return outermost
