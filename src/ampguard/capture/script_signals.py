"""Signal handlers of the script's that raise while the guard works: the exception is the script's, and reaches it.

Python runs a handler in whatever the main thread is doing. `signal.alarm` with a handler that raises `TimeoutError` ends a
plain script; while the guard investigates, its own `except Exception` would take that for a fix that does not work, or for
a fault of its own.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


_SIGNALS = tuple(sorted(signal.valid_signals()))


class HandlerRaised(BaseException):
    """Carries the exception past what catches the guard's own; `FaultBarrier` lets it out of this."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _Carrying:
    """A handler of the script's whose exceptions are carried. It compares as the handler itself."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, signum: int, frame: FrameType | None) -> Any:
        try:
            return self.handler(signum, frame)
        except Exception as error:
            raise HandlerRaised(error) from None

    def __eq__(self, other: object) -> bool:
        return other is self or bool(other == self.handler)

    def __hash__(self) -> int:
        return hash(self.handler)


@contextlib.contextmanager
def handlers_may_raise() -> Iterator[None]:
    """While the guard investigates, or runs the script's code again."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers do not run in this one
        return
    carrying = {signum: _Carrying(handler) for signum, handler in _handlers() if not isinstance(handler, _Carrying)}
    for signum, carrier in carrying.items():
        signal.signal(signum, carrier)
    try:
        yield
    finally:
        for signum, carrier in carrying.items():
            if signal.getsignal(signum) is carrier:  # else it has been replaced meanwhile
                signal.signal(signum, carrier.handler)


def is_of_handler(error: Exception) -> bool:
    """Whether an exception was raised by a handler of the script's, and by nothing of ours."""
    codes = {code for _, handler in _handlers() if (code := _code_of(handler)) is not None}
    trace = error.__traceback__ if codes else None
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _handlers() -> Iterator[tuple[int, Handler]]:
    """Those written in Python, but for the one that stands for Ctrl-C: that raises what nobody catches."""
    for signum in _SIGNALS:
        handler = signal.getsignal(signum)
        if callable(handler) and handler is not signal.default_int_handler:
            yield signum, handler


def _code_of(handler: Handler) -> CodeType | None:
    function = handler.handler if isinstance(handler, _Carrying) else handler
    function = getattr(function, "func", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None
