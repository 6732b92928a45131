"""The script's code runs again, and nobody hears of it: no print, no log line, no prompt of a debugger.

A `breakpoint()` in a replay would wait for an answer at a prompt that nobody sees, and take what was typed for the script.
Other threads of the script go on meanwhile: what they print, log and read is theirs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

DEBUGGERS = (("pdb", "set_trace"), ("ipdb", "set_trace"), ("pudb", "set_trace"), ("debugpy", "breakpoint"))
"""What scripts call to stop in a debugger, beside `breakpoint()`."""


class Silence:
    """Who is unheard: this thread, those that its work starts, and autograd's. Not: the script's others."""

    def __init__(self) -> None:
        me = threading.current_thread()
        self._others = {t.ident for t in threading.enumerate() if t is not me and not _is_foreign(t)}
        self._is_on = True

    def end(self) -> None:
        self._is_on = False

    def holds(self) -> bool:
        return self._is_on and threading.get_ident() not in self._others


class _Stream:
    """A standard stream: itself for other threads, an empty one for those that are unheard."""

    def __init__(self, silence: Silence, stream: TextIO | None) -> None:
        self._silence, self._stream, self._empty = silence, stream, io.StringIO()

    def __getattr__(self, name: str) -> Any:
        is_unheard = self._stream is None or self._silence.holds()
        return getattr(self._empty if is_unheard else self._stream, name)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Until the end of this, what this thread runs says and asks nothing, and no debugger sees it."""
    silence = Silence()
    tracer = sys.gettrace()
    with contextlib.ExitStack() as undo:
        undo.callback(silence.end)
        for name in ("stdin", "stdout", "stderr"):
            _replace(undo, sys, name, _Stream(silence, getattr(sys, name)))
        _replace(undo, sys, "breakpointhook", _unless(silence, sys.breakpointhook))
        for package, name in DEBUGGERS:
            if callable(stop := getattr(sys.modules.get(package), name, None)):
                _replace(undo, sys.modules[package], name, _unless(silence, stop))
        _replace(undo, logging.Logger, "handle", _unless(silence, logging.Logger.handle))
        if tracer is not None:
            sys.settrace(None)
            undo.callback(sys.settrace, tracer)
        yield


def _replace(undo: contextlib.ExitStack, place: object, name: str, value: object) -> None:
    undo.callback(setattr, place, name, getattr(place, name))
    setattr(place, name, value)


def _unless(silence: Silence, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return None if silence.holds() else function(*args, **kwargs)

    return call


def _is_foreign(thread: threading.Thread) -> bool:
    """Not started by Python: autograd's threads, which run the script's hooks."""
    return isinstance(thread, threading._DummyThread)
