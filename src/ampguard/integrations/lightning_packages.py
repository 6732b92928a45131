"""Lightning under its package names: `lightning` and `pytorch_lightning` with `lightning_fabric`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

TRAINERS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
"""Each package with a Trainer, and the Fabric that it builds upon."""


def imported() -> tuple[str, ...]:
    """The packages that the script has imported: those with a Trainer, and a Fabric that stands alone.

    Imports one where there is none yet. Raises ImportError where none is installed.
    """
    found = _in_use()
    if found:
        return found
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning_fabric"):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        return _in_use()
    raise ImportError("Lightning is not installed: pip install lightning (or pytorch-lightning, or lightning-fabric)")


def _in_use() -> tuple[str, ...]:
    trainers = [name for name in TRAINERS if hasattr(sys.modules.get(name), "Trainer")]
    fabrics = [TRAINERS[name] for name in TRAINERS if name not in trainers]
    return (*trainers, *(name for name in fabrics if hasattr(sys.modules.get(name), "Fabric")))


def fabric_of(package: str) -> str:
    """The Fabric of a package."""
    return TRAINERS.get(package, package)


def mixed_precision(package: str) -> Any:
    """Its `MixedPrecision`."""
    return importlib.import_module(f"{package}.plugins.precision").MixedPrecision


def callback(package: str) -> Any:
    """Its `Callback`; None where it has no Trainer."""
    return importlib.import_module(package).Callback if package in TRAINERS else None


def call_hook(trainer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """A hook of the LightningModule that `trainer` trains, called as its own package calls it."""
    package = next(cls.__module__ for cls in type(trainer).__mro__ if cls.__name__ == "Trainer")
    call = importlib.import_module(package.removesuffix(".trainer") + ".call")
    return call._call_lightning_module_hook(trainer, name, *args, **kwargs)
