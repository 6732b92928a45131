"""Causes that take many steps: one file per cause; the file's docstring is its page.

`trajectory` is what has been seen so far, `fits` are its statistics, `finding` is the registry of rules.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil


@functools.cache
def load() -> None:
    """Import every rule, once."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
