"""One file per cause of a broken protocol; the file's docstring is its page."""

from __future__ import annotations

import importlib
import pkgutil

NO_RULES = frozenset({"desk", "scene", "telling", "owners"})


def load() -> None:
    """Import every rule, once."""
    for module in pkgutil.iter_modules(__path__):
        if module.name not in NO_RULES:
            importlib.import_module(f"{__name__}.{module.name}")
