"""How a script ends: what Python itself does with the exception that left it, before it shuts down.

Everything here is done by hand because the alternative, to let the exception go on to Python's own top level, would
show our frames in the traceback and would leave no moment between the traceback and the exit to write the report.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from ampguard.errors import AmpguardError, StopRun, message_of
from ampguard.stderr import say

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def say_how_it_ended(error: BaseException | None) -> int:
    """Print what Python would print for `error` and return the exit status it would end with."""
    if error is None:
        return 0
    if isinstance(error, StopRun):
        return error.status
    if isinstance(error, SystemExit):
        return _exit_status(error)
    return _uncaught(error)


def wait_for_threads() -> None:
    """Wait for the non-daemon threads, as Python does at its end.

    `threading._shutdown` is what the interpreter calls by that name; it also wakes the idle workers of thread pools,
    which joining the threads one by one would wait for forever. Called again by the interpreter it returns at once.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:
        error.__traceback__ = _without_our_frames(error)
        print(f"Exception ignored in: {threading!r}", file=sys.stderr)
        traceback.print_exception(error)


def end_as_interrupted(error: KeyboardInterrupt) -> None:
    """Leave the process to Python the way Ctrl-C does: the interpreter shuts down and then dies by SIGINT.

    The traceback is on the terminal already, so this one exception is printed no second time.
    """
    shown_by = sys.excepthook

    def silent_once(kind: type[BaseException], value: BaseException, entries: TracebackType | None) -> None:
        if value is not error:
            shown_by(kind, value, entries)

    sys.excepthook = silent_once
    raise error


def hide_our_frames(error: BaseException) -> None:
    """Take ampguard's frames out of the tracebacks of `error` and of all that it came from."""
    for each in _chain(error, set()):
        each.__traceback__ = _without_our_frames(each)


def say_fault(what: str, fault: Exception) -> None:
    """One line about a fault of our own."""
    say(f"{what} ({type(fault).__name__}: {message_of(fault)})")


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    with contextlib.suppress(Exception):
        print(error.code, file=sys.stderr)
    return 1


def _uncaught(error: BaseException) -> int:
    hide_our_frames(error)
    kind, entries = type(error), error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, entries
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    hook = getattr(sys, "excepthook", None)
    if hook is None:  # Python's own words for a script that deleted it
        print("sys.excepthook is missing", file=sys.stderr)
        hook = sys.__excepthook__
    sys.audit("sys.excepthook", hook, kind, error, entries)
    try:
        hook(kind, error, entries)
    except SystemExit as leaving:
        return _exit_status(leaving)
    except BaseException as fault:
        hide_our_frames(fault)
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(fault), fault, fault.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(kind, error, entries)
    return 1


def _chain(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    for linked in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
        if isinstance(linked, BaseException):
            yield from _chain(linked, seen)


def _without_our_frames(error: BaseException) -> TracebackType | None:
    """The traceback less our frames; those of an accident of our own, at its very end, stay: they are the news."""
    entries = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    first = next((i for i, e in enumerate(entries) if not _is_ours(e)), len(entries))
    last = len(entries)
    if not isinstance(error, AmpguardError):
        while last > first and _is_ours(entries[last - 1]):
            last -= 1
    kept = [e for i, e in enumerate(entries) if i >= last or (i >= first and not _is_ours(e))]
    below = None
    for here in reversed(kept):
        here.tb_next = below
        below = here
    return below


def _is_ours(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_PACKAGE)
