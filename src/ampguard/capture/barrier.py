"""The fault barrier: whatever goes wrong inside ampguard stays inside ampguard.

Every call from a script's thread into the guard goes through it. A fault is told once, the guard switches itself off,
and the script goes on as if it had never been watched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Set
from typing import Any, Protocol, TypeVar

from ampguard import compat
from ampguard.capture.script_signals import HandlerRaised, is_of_handler
from ampguard.compat import asked_classes, classes_are_asked, dispatch_modes_on, function_modes_on, is_default_device

T = TypeVar("T")

captures_underway: set[int] = set()
"""CUDA graphs that are being captured in this process, by identity. For as long nothing may be queued, allocated, read
or waited for that the script did not ask for: one such call of ours, from any thread, and the capture is lost."""

_NONE: frozenset[int] = frozenset()


class OwnMode(Protocol):
    """A mode of the guard's own that steps aside for what the guard computes itself."""

    def step_aside(self, depth: int) -> bool: ...
    def come_back(self) -> None: ...


class FaultBarrier:
    """Catches all but `StopRun`, `KeyboardInterrupt`, `SystemExit`, and what the script's own signal handlers raise."""

    def __init__(self, on_fault: Callable[[Exception], None], acts_in_captures: bool = False) -> None:
        """`acts_in_captures`: what goes through it was asked for by the user (another precision), in CUDA graphs as well."""
        self._on_fault = on_fault
        self._captures: Set[int] = _NONE if acts_in_captures else captures_underway
        self.tripped = False
        self._let_out: Exception | None = None
        """The last exception of a signal handler that was let out."""
        self.own_modes = 0
        """Dispatch modes of ours on the stack (the tape): they need no hiding from."""
        self.calls: OwnMode | None = None
        """The function mode of ours that is on the stack: it has to be out of the way."""
        self.is_hiding = False
        """True while the script's own modes are switched off, so that they do not see our operators."""
        self.before_hiding: Callable[[], None] | None = None
        """Called first where modes are active: one may be ours, left on the stack of a thread that trained before. (One of
        the thread that trains now may be on its own stack: `own_modes` tells nothing of another's.)"""

    def call(self, function: Callable[..., T], *args: Any) -> T | None:
        """`function(*args)`, or None where the guard is off, has just failed, or stays out of a capture."""
        if self.tripped or self._captures:
            return None
        try:
            if asked_classes and classes_are_asked():
                with compat.past_classes():
                    return self.call(function, *args)
            depth, modes = function_modes_on(), dispatch_modes_on()
            if not (depth or modes) or self.is_hiding:
                return function(*args)
            if not depth and modes <= self.own_modes and not self.before_hiding:
                return function(*args)
            calls = self.calls
            if calls is not None and calls.step_aside(depth):
                try:
                    if depth == 1 and modes <= self.own_modes:
                        return function(*args)
                    return self.call(function, *args)
                finally:
                    calls.come_back()
            if is_default_device(depth) and modes <= self.own_modes and not (modes and self.before_hiding):
                return function(*args)
            if self.before_hiding is not None:
                self.before_hiding()
                if not self.is_observed():
                    return function(*args)
            self.is_hiding = True
            try:
                with compat.unseen():
                    return function(*args)
            finally:
                self.is_hiding = False
        except HandlerRaised as raised:
            self._let_out = raised.error
            raise raised.error from None
        except Exception as fault:
            if self._is_let_out(fault):
                raise
            self.trip(fault)
            return None

    def note(self, function: Callable[..., T], *args: Any) -> T | None:
        """The same for what asks no tensor for anything, and so needs no hiding: at half the cost."""
        if self.tripped or self._captures:
            return None
        try:
            return function(*args)
        except HandlerRaised as raised:
            self._let_out = raised.error
            raise raised.error from None
        except Exception as fault:
            if self._is_let_out(fault):
                raise
            self.trip(fault)
            return None

    def _is_let_out(self, error: Exception) -> bool:
        """Whether it is none of ours: a signal handler of the script's has raised it."""
        if error is not self._let_out and is_of_handler(error):
            self._let_out = error
        return error is self._let_out

    def is_observed(self) -> bool:
        """Whether modes of the script are active, which must not see what we do."""
        depth = function_modes_on()
        return bool(depth and not is_default_device(depth)) or dispatch_modes_on() > self.own_modes

    def trip(self, fault: Exception) -> None:
        """Something of ours went wrong: from now on every call is passed over."""
        self.tripped = True
        with contextlib.suppress(Exception):  # the report of a fault must not become a second fault
            self._on_fault(fault)
