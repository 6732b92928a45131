"""The probe of warnings: one that C++ raises while we call it names us, and is to name whoever called.

Warnings of Python code see through our frames by themselves (see `seen_through`). Those of C++ take the innermost frame
of Python, which is ours where a mode of ours has passed the call on: `float(loss)` of a loss that wants a gradient.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from ampguard.capture.glue.originals import is_our_file
from ampguard.capture.probing.probe import Probe


class WarningProbe(Probe):
    """Shows such a warning with the line that it would have without the guard."""

    def install(self) -> None:
        self._patches.replace(warnings, "showwarning", self._watch)

    def _watch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        @functools.wraps(original)
        def showwarning(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **named: Any) -> Any:
            if recorder.active and is_our_file(filename):
                frame = recorder.barrier.call(_caller, sys._getframe(1))
                if frame is not None:
                    filename, lineno = frame.f_code.co_filename, frame.f_lineno
            return original(message, category, filename, lineno, *rest, **named)

        return showwarning


def _caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither ours nor of the module `warnings`."""
    while frame is not None and (
        frame.f_globals.get("__name__") == "warnings" or is_our_file(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return frame
