"""What a framework wants to be told of a backward pass that it did not begin."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")
"""Where Fabric's modules are defined, under the names of both distributions."""

BEGUN = "_in_fabric_backward"
"""Fabric's own note that `fabric.backward` runs; without it, outputs of its modules refuse to be differentiated."""


@contextlib.contextmanager
def as_begun_by_fabric() -> Iterator[None]:
    """A recorded backward pass is run again: those of Fabric take it for their own."""
    known = [module for name in FABRIC if (module := sys.modules.get(name)) is not None and hasattr(module, BEGUN)]
    before = [getattr(module, BEGUN) for module in known]
    try:
        for module in known:
            setattr(module, BEGUN, True)
        yield
    finally:
        for module, value in zip(known, before, strict=True):
            setattr(module, BEGUN, value)
