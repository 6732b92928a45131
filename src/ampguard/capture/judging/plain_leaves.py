"""Weights that are plain tensors: they hang in no module, so they are found among what the operators were given."""

from __future__ import annotations

import weakref

from torch import Tensor

from ampguard.capture.events.operands import held_by
from ampguard.capture.record import Event
from ampguard.compat import version_of

_Seen = tuple[weakref.ref[Tensor], weakref.ref[Tensor], int]
"""A tensor, its gradient, and the gradient's version."""


class PlainLeaves:
    """The tensors that want a gradient, of a loop without modules and optimizers.

    Looked for again only where those known are not all that there are: one is gone, or has got no gradient.
    """

    def __init__(self) -> None:
        self._known: list[_Seen] = []
        self._looks = 0
        self._last: int | None = None
        """The last event when they were asked for."""

    def with_gradients(self, events: list[Event]) -> list[Tensor]:
        """Those among the operands and results of the events to whose gradients the last backward pass has added."""
        last, self._last = self._last, events[-1].index if events else None
        if last == self._last:
            return [leaf for ref, *_ in self._known if (leaf := ref()) is not None and leaf.grad is not None]
        old = {id(leaf): seen for seen in self._known if (leaf := seen[0]()) is not None}
        fresh = [leaf for ref, *_ in self._known if (leaf := ref()) is not None and _is_new(leaf, old)]
        self._looks += 1
        if len(fresh) < len(self._known) or not self._looks & (self._looks - 1):
            fresh = [leaf for leaf in leaves_in(events) if _is_new(leaf, old)]
        self._known = [(weakref.ref(p), weakref.ref(p.grad), version_of(p.grad)) for p in fresh if p.grad is not None]
        return fresh


class LastingLeaves:
    """Those that want a gradient in one step after the other: weights, and not an input that is made anew in each."""

    def __init__(self) -> None:
        self._last: list[weakref.ref[Tensor]] = []
        self._before: list[weakref.ref[Tensor]] = []

    def see(self, leaves: list[Tensor]) -> None:
        """Those of another step."""
        if leaves:
            self._before, self._last = self._last, [weakref.ref(leaf) for leaf in leaves]

    def lasting(self) -> list[Tensor]:
        """Those seen in both of the last two steps that were seen."""
        before = {id(leaf) for ref in self._before if (leaf := ref()) is not None}
        return [leaf for ref in self._last if (leaf := ref()) is not None and id(leaf) in before]


def _is_new(leaf: Tensor, old: dict[int, _Seen]) -> bool:
    """Whether its gradient is not the one that was seen, or was written to since."""
    if leaf.grad is None:
        return False
    _, gradient, version = old.get(id(leaf), (None, None, 0))
    return gradient is None or gradient() is not leaf.grad or version_of(leaf.grad) != version


def leaves_in(events: list[Event]) -> list[Tensor]:
    """The tensors that want a gradient among the operands and results of the events."""
    held = [held.tensor for event in events for held in held_by(event)]
    held += [tensor for event in events for ref in event.outputs if (tensor := ref()) is not None]
    return list({id(tensor): tensor for tensor in held if _is_wanted(tensor)}.values())


def _is_wanted(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf and tensor.requires_grad
    except RuntimeError:  # a view made under no_grad, of what was written to since: PyTorch refuses to say
        return False
