"""Hooks of the script's on its parameters that clip gradients in the middle of a scaled backward pass.

`p.register_hook(lambda g: g.clamp(-1, 1))` sees the gradient times the loss scale. In the iterations that are looked
at closely, what goes into such hooks and what comes out is compared, for the few parameters that stand for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.gradients import SMALL, OptimizerWatch
from ampguard.capture.record import Line

SMALLEST_LIMIT = 1e-3
"""Times the scale: a limit from there on may have been multiplied by the scale."""


@dataclass(slots=True)
class _Passage:
    """A parameter's gradient on its way through the script's hooks: before the first, and after each of them."""

    watch: OptimizerWatch
    hooks: list[Line | None]
    handles: list[Any] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)

    def clips(self) -> tuple[Line | None, float] | None:
        """The first hook that clips by value, and its limit."""
        for where, before, after in zip(self.hooks, self.seen, self.seen[1:], strict=False):
            limit = clipped_at(before, after)
            if limit is not None:
                return where, limit
        return None

    def see(self, gradient: Tensor) -> None:
        with torch.no_grad(), compat.unseen():
            self.seen.append(gradient.detach().clone())


class LeafHooks:
    """Looks at what the script's hooks do to gradients, in one backward pass."""

    def __init__(self) -> None:
        self._passages: list[_Passage] = []

    def begin(self, watches: Iterable[OptimizerWatch]) -> None:
        """Put a look before and behind the script's hooks. Most scripts have none."""
        self.end()  # a backward pass that raised
        for watch in watches:
            for p in watch.sample:
                hooks = compat.hooks_of_leaf(p) if p.numel() <= SMALL else None
                if hooks:
                    self._passages.append(_watched(p, hooks, watch))

    def end(self) -> list[tuple[OptimizerWatch, Line | None, float]]:
        """Take them away. For each optimizer whose gradients were clipped by value: where, and the limit."""
        passages, self._passages = self._passages, []
        found: dict[OptimizerWatch, tuple[Line | None, float]] = {}
        for passage in passages:
            for handle in passage.handles:
                handle.remove()
            clip = passage.clips()
            if clip is not None:
                found.setdefault(passage.watch, clip)
        return [(watch, where, limit) for watch, (where, limit) in found.items()]


def _watched(p: Tensor, hooks: Any, watch: OptimizerWatch) -> _Passage:
    """Looks before, between and behind the hooks: autograd goes by the order in which they were put in."""
    own = dict(hooks)
    passage = _Passage(watch, [_line_of(hook) for hook in own.values()])
    passage.handles.append(p.register_hook(passage.see))
    for identity, hook in own.items():
        del hooks[identity]
        hooks[identity] = hook
        passage.handles.append(p.register_hook(passage.see))
    return passage


def _line_of(hook: Any) -> Line | None:
    code = getattr(hook, "__code__", None)
    return Line(code, code.co_firstlineno) if isinstance(code, CodeType) else None


def clipped_at(before: Tensor, after: Tensor) -> float | None:
    """The limit, where what was larger than it was set to it and all else left as it was. Waits for the device."""
    if before.shape != after.shape or before.is_sparse or not before.numel():
        return None
    with torch.no_grad(), compat.unseen():
        limit = float(after.abs().max())
        cut = before.abs() > limit
        if not limit or not bool(cut.any()) or not bool(before.isfinite().all()):
            return None
        return limit if torch.equal(torch.where(cut, before.sign() * limit, before), after) else None
