"""SIGTERM: the scheduler wants the process gone. The report is written first, then the default action ends it."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed does not know it
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from ampguard.run.blocked import BlockedWatcher


class FinishOnSigterm:
    """A SIGTERM handler that writes the report and then dies by SIGTERM, so that the parent sees the true cause.

    To the script the signal still looks unhandled: the handler compares (and looks up in `signal`'s own table) as
    `SIG_DFL`. Lightning, for one, installs its own handlers only where it finds the default. A handler that the
    script installs replaces this one and stands. Like any Python handler it runs when the main thread is next
    between two bytecodes; where that thread does not come back, a watcher does the rest.
    """

    def __init__(self, finish: Callable[[BaseException], object], leave: Callable[[], None]) -> None:
        """`leave`: write what is known, from another thread."""
        self._finish = finish
        self._pid = os.getpid()
        self._deferring = False
        self._arrived = False
        self._watcher = BlockedWatcher(self._stands, leave)

    def install(self) -> None:
        """Take SIGTERM over, unless somebody (nohup, a host program) has decided about it already."""
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return
        with contextlib.suppress(ValueError):  # not the main thread: signals are not ours to handle
            signal.signal(signal.SIGTERM, self)
            self._watcher.install()
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self.uninstall)  # a worker is ended by SIGTERM, silently

    def uninstall(self) -> None:
        """Back to the default, unless the script has put a handler of its own in place."""
        with contextlib.suppress(ValueError):
            self._watcher.uninstall()
            if self._stands():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _stands(self) -> bool:
        """Whether the script has left it at this handler. (`signal.getsignal` shows it as `SIG_DFL`.)"""
        return bool(_signal.getsignal(signal.SIGTERM) is self)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Let a SIGTERM that arrives meanwhile wait: the report is being written."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
            if self._arrived:
                self._die()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._arrived = True
        self._watcher.handler_runs()
        if self._deferring:
            return
        if os.getpid() == self._pid:
            self._finish(SystemExit(128 + signal.SIGTERM))
        self._die()

    def _die(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        while True:  # to another thread, perhaps: this one does nothing more
            time.sleep(1)

    def __eq__(self, other: object) -> bool:
        return other is self or other == signal.SIG_DFL

    def __hash__(self) -> int:
        return hash(signal.SIG_DFL)
