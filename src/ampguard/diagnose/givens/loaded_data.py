"""Which code of the script's a DataLoader made a batch with: its collate function, its data set.

None of it is recorded, and none is run again. Where a batch is bad, it is where to look.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.script_lines import is_script_code
from ampguard.diagnose.evidence import Evidence

MOST_WRAPPERS = 4
"""Data sets in data sets (`Subset`) that are looked into."""

METHODS = ("__getitems__", "__getitem__", "__iter__")


def made_by_loader(evidence: Evidence, given: Tensor) -> str:
    """ " The DataLoader made it with `collate` (train.py:16)."; "" where it did not, or with PyTorch's own code only."""
    loader = evidence.replayer.loader_of(given) if evidence.replayer is not None else None
    if loader is None:
        return ""
    data, collate, has_workers = compat.parts_of_loader(loader)
    found = [place for part in (*_methods(data), collate) if (place := _place(part)) is not None]
    if not found:
        return ""
    where = " in its worker processes" if has_workers else ""
    return f" The DataLoader made it{where} with {' and '.join(found)}."


def _methods(data: Any) -> list[Any]:
    """By which methods samples are taken, of a data set and of those that it wraps; the innermost first."""
    found: list[Any] = []
    for _ in range(MOST_WRAPPERS):
        found[:0] = [method for name in METHODS if (method := getattr(type(data), name, None)) is not None]
        data = getattr(data, "dataset", None)
        if data is None:
            break
    return found


def _place(part: Any) -> str | None:
    """A function of the script's: its name, its file and its line."""
    while isinstance(part, functools.partial):
        part = part.func
    if not inspect.isroutine(part) and callable(part) and not isinstance(part, type):
        part = type(part).__call__  # a collator
    code = getattr(inspect.unwrap(part) if inspect.isroutine(part) else part, "__code__", None)
    if code is None or not is_script_code(code):
        return None
    name = getattr(part, "__qualname__", code.co_name).replace("<locals>.", "")
    return f"`{name}` ({Path(code.co_filename).name}:{code.co_firstlineno})"
