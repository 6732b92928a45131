"""Who listens to the moves of a training loop."""

from __future__ import annotations

from typing import Any, Protocol

from ampguard.protocol.events import Breach


class BreachListener(Protocol):
    """Who is told of a breach, in the very frame in which it happened."""

    def on_breach(self, breach: Breach, step: int) -> None: ...
    def on_suspicion(self, key: tuple[Any, ...], breach: Breach | None, step: int) -> None:
        """A breach that may yet turn out to be none; None withdraws it. What is left at the end is told then."""

    def on_told_early(self, key: tuple[Any, ...], breach: Breach, step: int) -> None:
        """A suspicion is told before the end: the longer it lasts the likelier it is. `on_suspicion` still takes it back."""

    def on_confirmed(self, key: tuple[Any, ...], breach: Breach, step: int) -> None:
        """It is one."""
