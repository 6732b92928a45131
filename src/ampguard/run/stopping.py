"""The end of a run before the script's own: after the steps asked for, at the first error, after too many steps held off.

An exception ends it, and a script may stand in its way: a bare `except:` in the loop swallows it, a thread that trains
ends alone. So it is kept that the run has ended, each later iteration is refused, and the exit status is known at the end.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

from ampguard.capture.recorder import FlightRecorder
from ampguard.errors import StopRun
from ampguard.stderr import say


class Stopping:
    """Ends the run, in whichever thread it trains."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._asked: tuple[str, int] | None = None
        self._has_said = False
        self._threads = _QuietThreads()
        self.has_raised = False
        """Whether the script was told."""

    @property
    def status(self) -> int:
        """The exit status that was asked for; 0 where the script's own stands."""
        return self._asked[1] if self._asked is not None else 0

    def at_next_forward(self, reason: str, status: int) -> None:
        """End the run as its next iteration begins. An exit status that was asked for stays."""
        if not self.status:
            self._asked = reason, status
        self._recorder.tells_forward = self._recorder.ends_run = True

    def now(self, reason: str, status: int) -> NoReturn:
        """End the run here. Raises StopRun."""
        self.at_next_forward(reason, status)
        self._raise(reason, status)

    def refuse(self) -> None:
        """An iteration begins. Raises StopRun where the run has ended; the script is told of that once."""
        if self._asked is None:
            return
        reason, status = self._asked
        if self.has_raised and status and not self._has_said:
            self._has_said = True
            say(
                f"the run was ended ({reason}), and the script went on, since it catches every exception or trains "
                "elsewhere as well: its further iterations are refused"
            )
        self._raise(reason, status)

    def undo(self) -> None:
        """The guard is off."""
        self._threads.undo()

    def _raise(self, reason: str, status: int) -> NoReturn:
        self.has_raised = True
        self._threads.install()
        raise StopRun(reason, status)


class _QuietThreads:
    """A thread that StopRun ends says nothing, as with SystemExit; what ends others is shown as before."""

    def __init__(self) -> None:
        self._shown_by: Any = None
        self._hook: Any = None

    def install(self) -> None:
        """Over the script's own hook, if it has one. Before the first StopRun nobody needs it."""
        if self._hook is not None and threading.excepthook is self._hook:
            return
        shown_by = self._shown_by = threading.excepthook

        def silent(args: threading.ExceptHookArgs) -> None:
            if not isinstance(args.exc_value, StopRun):
                shown_by(args)

        self._hook = threading.excepthook = silent

    def undo(self) -> None:
        if self._hook is not None and threading.excepthook is self._hook:
            threading.excepthook = self._shown_by
        self._hook = None
