"""`Amp(on_nonfinite="heal")` outside `ampguard run`: a guard of the engine's own, until such an engine is closed or gone."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from ampguard.run.folder import name_of_program
from ampguard.run.session import RunOptions, Session, guarding

Release = Callable[[BaseException | None], None]


class _OwnGuard:
    """The guard that was started because nobody had started one, and the engines that it heals."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._users = 0
        self._pid = os.getpid()

    def add(self, user: object, running: Session | None) -> tuple[Session, Release]:
        """The guard that heals for `user` (the one that runs, else one of our own), and what releases it."""
        session = running
        if session is None:
            session = self._session = Session(RunOptions(script_name=name_of_program()))
            self._users, self._pid = 0, os.getpid()
            session.start()
        if session is not self._session:
            return session, lambda error: None
        self._users += 1
        gone = weakref.finalize(user, self._remove, session, None)

        def release(error: BaseException | None) -> None:
            if gone.detach() is not None:
                self._remove(session, error)

        return session, release

    def _remove(self, session: Session, error: BaseException | None) -> None:
        """An engine is closed or gone, or the process ends."""
        if session is not self._session or os.getpid() != self._pid:
            return
        self._users -= 1
        if self._users <= 0:
            self._session = None
            session.finish(error or getattr(sys, "last_value", None))  # what ended the script, where an exception did


_own = _OwnGuard()


def heal_for(user: object, optimizers: Sequence[Optimizer]) -> Release:
    """See to it that a guard runs and heals for as long as `user` lives, or until what is returned is called.

    Raises RunFolderError where it cannot start.
    """
    session, release = _own.add(user, guarding())
    session.heal_from_now_on(optimizers)
    return release
