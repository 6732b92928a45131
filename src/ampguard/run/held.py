"""A session, held so that no fault of its own can change how the script runs or ends."""

from __future__ import annotations

import os

from ampguard.errors import AmpguardError
from ampguard.run.ending import say_fault
from ampguard.run.protocols import GuardSession
from ampguard.run.signals import FinishOnSignals
from ampguard.stderr import keep


class HeldSession:
    """Started once, finished once: by the script's end, or by a signal."""

    def __init__(self, session: GuardSession | None) -> None:
        self._session = session
        self._pid = os.getpid()
        self._finished = False
        self._signals = FinishOnSignals(self.finish, self.leave)

    def start(self) -> None:
        if self._session is None:
            return
        keep()  # for as long as the process lives
        try:
            self._session.start()
        except AmpguardError:
            raise
        except Exception as fault:
            self._session = None
            say_fault("could not start; the script runs unguarded", fault)
            return
        self._signals.install()

    def is_other_process(self) -> bool:
        """Whether the script forked and this is the child: the report is the parent's."""
        return os.getpid() != self._pid

    def finish(self, error: BaseException | None) -> int:
        """The exit status that the guard asks for; 0: the script's own."""
        if self._session is None or self._finished:
            return 0
        status = None
        with self._signals.deferred():
            self._finished = True
            try:
                status = self._session.finish(error)
            except Exception as fault:
                say_fault("could not finish its report", fault)
        self._signals.uninstall()
        return status or 0

    def leave(self) -> None:
        """From another thread: the main one is blocked, and a signal ends the process."""
        if self._session is not None:
            self._session.leave()
