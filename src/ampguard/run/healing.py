"""`Amp(on_nonfinite="heal")` outside `ampguard run`: a guard of the engine's own, for as long as such an engine lives."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

from torch.optim import Optimizer

from ampguard.run.session import RunOptions, Session, guarding


class _OwnGuard:
    """The guard that was started because nobody had started one, and the engines that it heals."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._users = 0
        self._pid = os.getpid()

    def add(self, user: object, running: Session | None) -> Session:
        """The guard that heals for `user`: the one that runs, else one of our own."""
        session = running
        if session is None:
            session = self._session = Session(RunOptions(script_name=_script_name()))
            self._users, self._pid = 0, os.getpid()
            session.start()
        if session is self._session:
            self._users += 1
            weakref.finalize(user, self._remove, session)
        return session

    def _remove(self, session: Session) -> None:
        """An engine is gone, or the process ends."""
        if session is not self._session or os.getpid() != self._pid:
            return
        self._users -= 1
        if self._users <= 0:
            self._session = None
            session.finish(getattr(sys, "last_value", None))  # what ended the script, where an exception did


_own = _OwnGuard()


def heal_for(user: object, optimizers: Sequence[Optimizer]) -> None:
    """See to it that a guard runs and heals for as long as `user` lives. Raises RunFolderError where it cannot start."""
    _own.add(user, guarding()).heal_from_now_on(optimizers)


def _script_name() -> str:
    return Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "session"
