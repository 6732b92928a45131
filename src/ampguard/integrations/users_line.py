"""The line of the training script behind a call that came through a framework."""

from __future__ import annotations

import sys

from ampguard.engine.misuse import Line

_NOT_THE_SCRIPT = (
    "accelerate.",
    "ampguard.",
    "contextlib",
    "functools",
    "lightning.",
    "lightning_fabric.",
    "pytorch_lightning.",
    "torch.",
    "transformers.",
)


def users_line() -> Line | None:
    """The nearest line that belongs to no framework; None on a thread of PyTorch's own."""
    frame = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_NOT_THE_SCRIPT):
        frame = frame.f_back  # type: ignore[assignment]
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None


def shown(line: Line | None) -> str:
    """`train.py:12`; where it is unknown: `(unknown line)`."""
    return f"{line[0].rpartition('/')[2]}:{line[1]}" if line is not None else "(unknown line)"
