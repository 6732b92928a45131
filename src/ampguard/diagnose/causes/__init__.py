"""One file per cause; the file's docstring is its page."""

from __future__ import annotations

import importlib
import pkgutil


def load() -> None:
    """Import every rule, once."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
