"""Who listens to the recorder."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from ampguard.capture.record import BadResult, Event


class Listener(Protocol):
    """Who is told what the recorder saw. `on_bad` may take its time: the training waits for it."""

    def on_bad(self, bad: BadResult) -> None: ...
    def on_step(self, step: int) -> None: ...
    def on_forward(self) -> None: ...


class LiveTracer(Protocol):
    """Sees operators while the step runs: for steps that cannot be replayed."""

    def watch(self, event: Event) -> AbstractContextManager[Any]: ...
    def begin_step(self) -> None: ...
