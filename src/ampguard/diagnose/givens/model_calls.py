"""Which events of a step are the model's: calls of modules with parameters; without any, operators that read a weight."""

from __future__ import annotations

from collections.abc import Sequence

from ampguard import compat
from ampguard.capture.events.operands import held_by
from ampguard.capture.record import Event, RootCall


def model_calls(events: Sequence[Event]) -> list[Event]:
    """In their order. A model of plain tensors is what reads leaves that require gradients."""
    calls: list[Event] = [event for event in events if has_parameters(event)]
    return calls or [event for event in events if not isinstance(event, RootCall) and _reads_weight(event)]


def has_parameters(event: Event) -> bool:
    return isinstance(event, RootCall) and compat.has_parameters(event.module)


def _reads_weight(event: Event) -> bool:
    return any(compat.is_wanting_leaf(held.tensor) for held in held_by(event))
