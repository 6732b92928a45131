"""What the runner asks of a guard, and nothing more: the runner can be tested without torch."""

from __future__ import annotations

from typing import Protocol


class GuardSession(Protocol):
    """The guard around one run of a script."""

    def start(self) -> None:
        """Install the probes. Called once, when the script was found and compiled and before its first line runs.

        An `AmpguardError` raised here ends the program before the script starts; any other exception is a fault of
        ours, and the script runs unguarded.
        """

    def finish(self, error: BaseException | None) -> int | None:
        """Write the report and say where it is. May be called more than once; only the first call counts.

        `error` is what ended the script: None for a normal end, else the exception that left it (a `SystemExit`
        that the script raised, a `StopRun`, a `KeyboardInterrupt`, a `SystemExit(143)` for SIGTERM, with 129
        for SIGHUP).
        Not called in a forked child, nor where the script never started. Returns the exit status to end with instead of the
        script's own, if any (it has stopped the run).
        """

    def leave(self) -> None:
        """Write what is known already. Called from another thread, where a signal ends a process whose main thread is
        blocked; `finish` may be at work there. Nothing is judged, and nobody is waited for.
        """
