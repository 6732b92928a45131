"""ampguard: says why a mixed-precision training run broke, with a fix that was tried on the very step that failed.

Beside that an AMP engine, `Amp`. Importing this package patches nothing; `watch()` does, for as long as its block runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ampguard._version import __version__
from ampguard.errors import (
    AmpguardError,
    CheckpointError,
    EngineError,
    LossError,
    NonfiniteError,
    PatternError,
    PoisonedStateError,
    PrecisionError,
    ProtocolError,
    RunFolderError,
    SetupError,
    UsageError,
)
from ampguard.incident import Fix, Incident, Location, Report

if TYPE_CHECKING:
    from ampguard.engine.amp import Amp
    from ampguard.engine.force_fp32.front import force_fp32
    from ampguard.engine.own_loop import precision
    from ampguard.run.watch import guarding, watch

__all__ = [
    "Amp",
    "AmpguardError",
    "CheckpointError",
    "EngineError",
    "Fix",
    "Incident",
    "Location",
    "LossError",
    "NonfiniteError",
    "PatternError",
    "PoisonedStateError",
    "PrecisionError",
    "ProtocolError",
    "Report",
    "RunFolderError",
    "SetupError",
    "UsageError",
    "__version__",
    "force_fp32",
    "guarding",
    "precision",
    "watch",
]

_NEED_TORCH = {
    "Amp": "ampguard.engine.amp",
    "force_fp32": "ampguard.engine.force_fp32.front",
    "guarding": "ampguard.run.watch",
    "precision": "ampguard.engine.own_loop",
    "watch": "ampguard.run.watch",
}
"""Imported when first asked for: reading a report does not need torch."""


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
