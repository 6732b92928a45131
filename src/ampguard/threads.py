"""Whether this process has ever had a second thread.

glibc takes a lock without an atomic operation until a process starts its first thread, and never again from then on
(`__libc_single_threaded`, since 2.32). A training step of 2,000 small operators takes some ten thousand locks, in `malloc` most
of them: a thread that only sleeps costs it 4 to 6 %. So the guard starts none in a process that has none, and is free to where
there is one already: behind an OpenMP pool, a DataLoader's workers, a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

_waiting: list[Callable[[], object]] = []


def _reader() -> Callable[[], bool]:
    try:
        import ctypes

        flag = ctypes.c_ubyte.in_dll(ctypes.CDLL(None), "__libc_single_threaded")
    except (ImportError, OSError, TypeError, ValueError):  # another C library: a thread costs what it costs there
        return lambda: False
    return lambda: flag.value != 0


is_single_threaded: Callable[[], bool] = _reader()
"""Whether locks cost next to nothing yet. False where nobody can tell."""


def at_first_thread(begin: Callable[[], object]) -> None:
    """Call `begin` once the process has a second thread: now, or when `look_for_first_thread` finds one."""
    _waiting.append(begin)
    look_for_first_thread()


def no_longer(begin: Callable[[], object]) -> None:
    """Do not call it any more."""
    if begin in _waiting:
        _waiting.remove(begin)


def look_for_first_thread() -> None:
    """Call those who wait for a second thread, if there is one. Cheap: it is asked in every step."""
    if _waiting and not is_single_threaded():
        begun = _waiting[:]
        _waiting.clear()
        for begin in begun:
            begin()
