"""Where cards and summaries are printed: on stderr, since stdout belongs to the script."""

from __future__ import annotations

from rich.console import Console


def stderr_console() -> Console:
    """A console on stderr: colours on a terminal, plain text elsewhere; nothing in our texts is markup."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False, force_jupyter=False)
