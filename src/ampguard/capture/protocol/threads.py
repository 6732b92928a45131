"""Which thread trains: gradients of another thread's optimizer are never looked at, nor are its calls mixed with ours.

While a backward pass runs, autograd's engine writes to `.grad` without holding the interpreter's lock: whoever reads
it from another thread at that moment reads freed memory. So every optimizer belongs to the thread that has last made,
cleared or stepped it, and where several threads train at once the protocol follows the first of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any

from ampguard import compat
from ampguard.capture.protocol.watches import Watches


class TrainingThread:
    """The thread whose calls are followed, by its identity; 0 until backward is first called."""

    __slots__ = ("_lose_track", "_watches", "ident", "is_shared")

    def __init__(self, watches: Watches, lose_track: Callable[[], None]) -> None:
        self.ident = 0
        self.is_shared = False
        """Two threads have trained at once: a call of ours that comes inside a call of theirs cannot be followed."""
        self._watches = watches
        self._lose_track = lose_track

    def hears(self, optimizer: Any = None) -> bool:
        """Whether a call is followed that another thread than `ident` makes; `optimizer`, if any, is its own now.

        A thread of autograd's engine (an optimizer that steps inside the backward pass) is nobody of its own.
        """
        if compat.in_backward():
            return True
        watch = self._watches.by_id.get(id(optimizer)) if optimizer is not None else None
        if watch is not None:
            watch.claim(get_ident())
        return not self.ident

    def follows(self) -> bool:
        """Whether a backward pass is followed that begins in another thread than `ident`."""
        if compat.in_backward():
            return True
        me = get_ident()
        if not self.ident:
            self.ident = me
            return True
        for watch in tuple(self._watches.optimizers):
            watch.disown(me)
        if not self._has_ended():
            self.is_shared = True
            return False
        self.ident = me
        self._lose_track()
        return True

    def missed(self) -> None:
        """A call of the followed thread came while another's call was under way, which is not looked at."""
        if self.is_shared and get_ident() == self.ident and not compat.in_backward():
            self._lose_track()

    def _has_ended(self) -> bool:
        """Whether the followed thread is gone, or its optimizers are gone or others' by now."""
        if not any(watch.thread == self.ident for watch in tuple(self._watches.optimizers)):
            return True
        return all(thread.ident != self.ident for thread in threading.enumerate())
