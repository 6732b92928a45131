"""The garbage collector while a replay is written down."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

ALLOCATIONS = 20_000
"""New objects before the collector looks at them: what is kept of some 1,000 operators."""


@contextlib.contextmanager
def collecting_seldom() -> Iterator[None]:
    """What is kept of each operator makes Python's collector run every 50 operators, a fifth of a replay's time, for nothing."""
    youngest, *others = gc.get_threshold()
    if youngest:  # (0: the script has switched it off)
        gc.set_threshold(max(youngest, ALLOCATIONS), *others)
    try:
        yield
    finally:
        gc.set_threshold(youngest, *others)
