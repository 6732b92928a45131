"""Backward passes of the loop's own, beside `amp.backward()`, over gradients that carry the loss scale.

What `loss.backward()` adds to them is lost: it will be divided by a scale that it was not multiplied with. But
`features.backward(gradient)` carries on a gradient that has the scale already. Only a hook sees which one it was: clipping
changes gradients too. The hooks are there in the first steps, where a wrong loop shows itself, and again for some steps
after one in which somebody has changed gradients; a healthy step has none.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine import misuse
from ampguard.engine.holding import Holding
from ampguard.engine.misuse import Line

WATCHED_UPDATES = 8
"""Updates of the loss scale after which the hooks go."""

_handles: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()
"""Only the last Amp that an optimizer was given to has hooks for it."""


@dataclass(slots=True)
class _Plain:
    """A backward pass of a loss that was not scaled: its line, and the gradients that it has added to."""

    where: Line | None
    gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def are_held(self) -> bool:
        """Whether any of these gradients is still there. Waits for the device."""
        return any(p.grad is gradient and _holds_something(gradient) for p, gradient in self.gradients)


class OtherBackwards:
    """By optimizer: what backward passes that were not ours have done to its gradients."""

    def __init__(self, read_scale: Callable[[], float], is_held: Callable[[Holding], bool]) -> None:
        self._read_scale = read_scale
        self._is_held = is_held
        self._is_ours = 0
        self._updates_left = 0
        self._watched: list[Optimizer] = []
        self._plain: dict[str, _Plain] = {}
        self._carried_on: set[str] = set()
        """Optimizers that a gradient was carried on to: loops do that in each step, or never."""
        self.scale_was_told = False
        """Whether the loop has asked for the loss scale: it may multiply by it."""
        self._judged: tuple[weakref.ref[Tensor], bool | None] | None = None

    def watch(self, holdings: Sequence[Holding]) -> None:
        """Put the hooks on, for some steps."""
        if not self._updates_left:
            for holding in holdings:
                self._remove(holding.optimizer)
                _handles[holding.optimizer] = [
                    _registered(leaf, _hook(weakref.ref(self), weakref.ref(holding), p))
                    for leaf, p in holding.glanced_at()
                    if leaf.requires_grad and leaf.is_leaf
                ]
            self._watched = [holding.optimizer for holding in holdings]
        self._updates_left = WATCHED_UPDATES

    def watch_anew(self, holdings: Sequence[Holding]) -> None:
        """Copies of those that were watched have no hooks."""
        self._updates_left = 0
        self.watch(holdings)

    def updated(self) -> None:
        """A step is over."""
        if self._updates_left:
            self._updates_left -= 1
            if not self._updates_left:
                for optimizer in self._watched:
                    self._remove(optimizer)

    @staticmethod
    def _remove(optimizer: Optimizer) -> None:
        for handle in _handles.pop(optimizer, ()):
            handle.remove()

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """`amp.backward`."""
        self._is_ours += 1
        try:
            yield
        finally:
            self._is_ours -= 1

    def reached(self, holding: Holding, parameter: Tensor) -> None:
        """A gradient was added to that of a parameter."""
        if self._is_ours:
            return
        is_held = self._is_held(holding)
        is_plain = self._is_plain()
        if is_plain is False:
            self._carried_on.add(holding.name)
        elif is_plain and is_held and parameter.grad is not None:
            plain = self._plain.setdefault(holding.name, _Plain(misuse.calling_line()))
            plain.gradients.append((parameter, parameter.grad))

    def _is_plain(self) -> bool | None:
        """Whether the backward pass that runs is that of a loss, unscaled; None where nothing is known of it."""
        running = compat.running_backward()
        if running is None:
            return None
        first = running[0][0]
        if self._judged is None or self._judged[0]() is not first:  # once for all parameters
            self._judged = weakref.ref(first), self._is_loss(*running)
        return self._judged[1]

    def _is_loss(self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> bool | None:
        if any(gradient is not None and not bool((gradient == 1).all()) for gradient in gradients):
            return False
        if self._read_scale() == 1.0:
            return None
        may_be_scaled = self.scale_was_told and any(map(compat.is_multiplied, roots))  # saved factors are freed by now
        return None if may_be_scaled else True

    def carries_on(self, holding: Holding) -> bool:
        """Whether gradients that carry the scale come to it by a backward pass of the loop's own."""
        return holding.name in self._carried_on

    def look_again(self, holding: Holding) -> None:
        """Another backward pass is to come: what was cleared since is no matter."""
        if holding.name in self._plain and not self._plain[holding.name].are_held():
            self.forget(holding)

    def plain_line(self, holding: Holding) -> tuple[Line | None] | None:
        """Where a loss that was not scaled was differentiated, if its gradients are held; None where none was."""
        self.look_again(holding)
        return (self._plain[holding.name].where,) if holding.name in self._plain else None

    def forget(self, holding: Holding) -> None:
        """Its gradients were used or cleared."""
        self._plain.pop(holding.name, None)


def _hook(
    others: weakref.ref[OtherBackwards], holding: weakref.ref[Holding], parameter: Tensor
) -> Callable[[Tensor], None]:
    """Keeps nothing of an Amp alive."""
    parameters = weakref.ref(parameter)

    def reached(_: Tensor) -> None:
        them, its, own = others(), holding(), parameters()
        if them is not None and its is not None and own is not None:
            them.reached(its, own)

    return compat.observing(reached)


def _registered(leaf: Tensor, hook: Callable[[Tensor], None]) -> Any:
    register: Callable[[Callable[[Tensor], None]], Any] = leaf.register_post_accumulate_grad_hook
    return register(hook)


def _holds_something(gradient: Tensor) -> bool:
    local = compat.local_part(gradient.detach())
    return local.layout != torch.strided or bool(local.any())
