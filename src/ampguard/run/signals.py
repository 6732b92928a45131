"""SIGTERM (a scheduler wants the process gone) and SIGHUP (its terminal is gone). The report is written first, then the
default action ends it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed does not know it
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from ampguard.run.blocked import BlockedWatcher

SIGNALS = tuple(signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))  # one on Windows


class FinishOnSignals:
    """A handler that writes the report and then dies by the signal itself, so that the parent sees the true cause.

    To the script a signal still looks unhandled: the handler compares (and looks up in `signal`'s own table) as
    `SIG_DFL`. Lightning, for one, installs its own handlers only where it finds the default. A handler that the
    script installs replaces this one and stands. Like any Python handler it runs when the main thread is next
    between two bytecodes; where that thread does not come back, a watcher does the rest.
    """

    def __init__(self, finish: Callable[[BaseException], object], leave: Callable[[], None]) -> None:
        """`leave`: write what is known, from another thread."""
        self._finish = finish
        self._pid = os.getpid()
        self._deferring = False
        self._arrived: int | None = None
        self._watcher = BlockedWatcher(self._stands, leave)

    def install(self) -> None:
        """Take the signals over about which nobody else (nohup, a host program) has decided already."""
        free = [signum for signum in SIGNALS if signal.getsignal(signum) == signal.SIG_DFL]
        if not free:
            return
        with contextlib.suppress(ValueError):  # not the main thread: signals are not ours to handle
            for signum in free:
                signal.signal(signum, self)
            self._watcher.install()
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self.uninstall)  # a worker is ended silently

    def uninstall(self) -> None:
        """Back to the default, unless the script has put a handler of its own in place."""
        with contextlib.suppress(ValueError):
            self._watcher.uninstall()
            for signum in filter(self._stands, SIGNALS):
                signal.signal(signum, signal.SIG_DFL)

    def _stands(self, signum: int) -> bool:
        """Whether the signal is left at this handler. (`signal.getsignal` shows it as `SIG_DFL`.)"""
        return bool(_signal.getsignal(signum) is self)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Let a signal that arrives meanwhile wait: the report is being written."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
            if self._arrived is not None:
                self._die(self._arrived)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._arrived = signum
        self._watcher.handler_runs()
        if self._deferring:
            return
        if os.getpid() == self._pid:
            self._finish(SystemExit(128 + signum))
        self._die(signum)

    def _die(self, signum: int) -> None:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        while True:  # to another thread, perhaps: this one does nothing more
            time.sleep(1)

    def __eq__(self, other: object) -> bool:
        return other is self or other == signal.SIG_DFL

    def __hash__(self) -> int:
        return hash(signal.SIG_DFL)
