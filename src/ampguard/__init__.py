"""ampguard: says why a mixed-precision training run broke, with a fix that was tried on the very step that failed.

Importing this package patches nothing; `watch()` does, for as long as its block runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ampguard._version import __version__
from ampguard.errors import AmpguardError, RunFolderError, UsageError
from ampguard.incident import Fix, Incident, Location, Report

if TYPE_CHECKING:
    from ampguard.run.watch import watch

__all__ = [
    "AmpguardError",
    "Fix",
    "Incident",
    "Location",
    "Report",
    "RunFolderError",
    "UsageError",
    "__version__",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name == "watch":  # here: reading a report does not need torch
        from ampguard.run.watch import watch

        return watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
