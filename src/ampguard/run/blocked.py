"""A SIGTERM or SIGHUP that finds the main thread blocked in C++: in a collective that waits for a rank which is gone.

A Python handler runs between two bytecodes of the main thread, and there is no next one. The interpreter's own C handler
writes the signal's number to the wakeup file at once, wherever the main thread is. A thread that sleeps on that file
gives the Python handler a moment, and then has what is known written down and ends the process by the signal. It is started
where the process is one of several ranks, and elsewhere once there is another thread: a first one costs (`ampguard.threads`),
and without any the main thread waits for nobody in C++.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

from ampguard.threads import at_first_thread, no_longer

BEGINS_WITHIN_S = 1.0
"""How long the main thread may take to come back to Python."""

ENDS_WITHIN_S = 15.0
"""How long the handler may take then: schedulers send SIGKILL after 30 s."""

WRITES_WITHIN_S = 5.0
"""How long it may take to write what is known."""

RESTS_WITHIN_S = 1.0
NO_SIGNAL = b"\0"
"""No signal has this number: the thread is to end."""

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""What launchers of several processes set: torchrun, Slurm, Open MPI, MPICH."""


class BlockedWatcher:
    """Ends the process by the signal where the Python handler cannot."""

    def __init__(self, stands: Callable[[int], bool], leave: Callable[[], None]) -> None:
        """`stands`: whether a signal still is the guard's to handle. `leave`: write what is known, from another thread."""
        self._stands = stands
        self._leave = leave
        self._begun = threading.Event()
        self._leaving = False
        self._read = self._wakeup = -1
        self._rests = threading.Event()
        self._native_id = 0
        self._is_watching = False

    def install(self) -> None:
        """Begin to watch, unless somebody else is woken up by signals. To be called in the main thread."""
        if os.name != "posix":
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
            return
        self._read, self._wakeup = read, write
        if any(name in os.environ for name in RANK_VARIABLES):
            self._begin()
        else:
            at_first_thread(self._begin)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._rest, after_in_parent=self._go_on)

    def _begin(self) -> None:
        self._is_watching = True
        self._rests.clear()
        _thread.start_new_thread(self._watch, (self._read,))  # not threading's: a script does not find it among its own

    def _rest(self) -> None:
        """The process is about to fork: Python tells of threads that are there then (3.12)."""
        if self._wakeup != -1 and self._is_watching:
            os.write(self._wakeup, NO_SIGNAL)
            if self._rests.wait(RESTS_WITHIN_S):
                _until_gone(self._native_id)

    def _go_on(self) -> None:
        """The process has forked, and this is the parent."""
        if self._wakeup != -1 and self._rests.is_set():
            self._begin()

    def uninstall(self) -> None:
        """Watch no longer; in a forked child too, whose signals are not its parent's. A wakeup file of the script's stays."""
        if self._wakeup == -1:
            return
        no_longer(self._begin)
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._wakeup):
            signal.set_wakeup_fd(before)
        self._wakeup = -1  # left open: a script may have kept its number

    def handler_runs(self) -> None:
        """The main thread is in the Python handler; if it came too late, it does nothing any more."""
        self._begun.set()
        while self._leaving:
            time.sleep(0.05)

    def _watch(self, read: int) -> None:
        self._native_id = threading.get_native_id()
        with contextlib.suppress(OSError):
            while numbers := os.read(read, 64):
                for number in filter(self._stands, numbers.replace(NO_SIGNAL, b"")):
                    self._end(number)
                if NO_SIGNAL in numbers:
                    break
        self._rests.set()

    def _end(self, signum: int) -> None:
        if self._begun.wait(BEGINS_WITHIN_S):
            time.sleep(ENDS_WITHIN_S)
        self._leaving = True
        written = threading.Event()

        def leave() -> None:
            with contextlib.suppress(Exception):
                self._leave()
            written.set()

        _thread.start_new_thread(leave, ())
        written.wait(WRITES_WITHIN_S)
        _die_by(signum)


def _until_gone(thread: int) -> None:
    """Wait until the system has no such thread any more, which is some microseconds after its last line of Python."""
    for _ in range(50):
        if not os.path.exists(f"/proc/self/task/{thread}"):
            break
        time.sleep(0.001)


def _die_by(signum: int) -> None:
    """Restore the default action and send the signal again. `signal.signal` is for the main thread only."""
    try:
        import ctypes

        set_action = ctypes.pythonapi.PyOS_setsig
        set_action.argtypes, set_action.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        set_action(signum, None)
    except (ImportError, AttributeError):
        os._exit(128 + signum)
    os.kill(os.getpid(), signum)
