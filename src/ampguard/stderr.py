"""Where the guard's own words go: to the stderr of whoever started the run, since stdout belongs to the script.

A script may put something else in its place, to capture what a library prints or to keep a log. Its words and ours are
not the same: so what stood for stderr when the guard began is kept, and used for as long as it can be written to.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TextIO

_kept: TextIO | None = None


def keep() -> Callable[[], None]:
    """What stands for stderr now stays ours, unless another is kept already, until what is returned is called."""
    global _kept
    if _kept is not None or sys.stderr is None:
        return lambda: None
    _kept = sys.stderr
    return _release


def stream() -> TextIO | None:
    """Where to write: what was kept; what stands for stderr now, where nothing was or that is closed. None: nowhere."""
    return _kept if _kept is not None and _is_open(_kept) else sys.stderr


def say(text: str) -> None:
    """One line of ours. A closed or broken stderr is no reason to disturb a training."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if (out := stream()) is not None:
            print(f"ampguard: {text}", file=out, flush=True)


def _release() -> None:
    global _kept
    _kept = None


def _is_open(out: TextIO) -> bool:
    try:
        if out.closed:
            return False
        number = out.fileno()
    except (OSError, ValueError, AttributeError):  # it is in memory, or a notebook's
        return True
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
