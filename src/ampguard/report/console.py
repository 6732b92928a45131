"""Where cards and summaries are printed: see `stderr`."""

from __future__ import annotations

from rich.console import Console

from ampguard.stderr import stream


def stderr_console() -> Console:
    """A console on stderr: colours on a terminal, plain text elsewhere; nothing in our texts is markup."""
    return Console(file=stream(), stderr=True, highlight=False, markup=False, emoji=False, force_jupyter=False)
