"""A loss scale of the script's own, without any GradScaler: is a gradient clipped before it is divided?

A large constant by which a loss is multiplied may mean anything. It is a loss scale where the script also divides the
gradients by it before the optimizer's step; only then, and only if they were clipped in between, something is told.
In iterations that are looked at closely. Where no optimizer holds what was differentiated (a float16 model, its float32
masters in the optimizer), the gradients are followed from the one to the other: `copied_gradients.py`. A loop that has
divided so far and steps with undivided ones is told as well, and one that never divides by what can only be a loss scale:
`never_divided.py`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.copied_gradients import LooseGradients, SourceGradient, ratio_of
from ampguard.capture.protocol.gradients import SMALL, OptimizerWatch
from ampguard.capture.protocol.loss_scale import constant_factors
from ampguard.capture.protocol.never_divided import NeverDivided, is_loss_scale
from ampguard.capture.record import Line

SMALLEST_SCALE = 8.0
SAME = 1e-2
CLIPPED = 1e-3
FEWEST_DIVISIONS = 2
"""Steps in which gradients were divided by the scale, before one in which they are not is told."""
MOST_DIVISIONS = 8
SMALLEST_LIMIT = 1e-3
"""Times the scale: a limit from there on that is a round multiple of it was multiplied by it."""


@dataclass(slots=True)
class _Scaled:
    """The gradients of one optimizer that carry such a scale; `kept`: the first elements of one of them, as they were."""

    scale: float
    where: Line | None
    parameter: Tensor
    kept: Tensor
    clips: list[Line | None] = field(default_factory=list)
    made_smaller: float | None = 1.0
    """By what all clips together divided them; None where that is not one number."""

    def ratio(self) -> float | None:
        """What it was over what it is now; None where that is not one number. Waits for the device."""
        now = self.parameter.grad
        return ratio_of(self.kept, compat.local_part(now)) if now is not None else None

    def keep(self) -> None:
        if self.parameter.grad is not None:
            with torch.no_grad(), compat.unseen():
                here = compat.local_part(self.parameter.grad.detach())
                self.kept = here.flatten()[: self.kept.numel()].clone()

    def clipped(self, limit: float | None, where: Line | None) -> None:
        """A call that clips is over."""
        ratio = self.ratio()
        knows_scale = limit is not None and is_round_multiple(limit, self.scale)
        if (ratio is None or ratio > 1.0 + CLIPPED) and not knows_scale:
            self.clips.append(where)
            self.made_smaller = self.made_smaller * ratio if self.made_smaller and ratio else None
        self.keep()


@dataclass(frozen=True, slots=True)
class ClippedScaled:
    """Gradients were clipped while they carried a scale of the script's own."""

    scale: float
    backward: Line | None
    clip: Line | None
    made_smaller: float | None
    """By what the clip divided them."""


@dataclass(frozen=True, slots=True)
class Undivided:
    """Gradients with which an optimizer is about to step and which carry such a scale, though they were divided before."""

    scale: float
    backward: Line | None
    is_beside: bool = False
    """Those of the same loss that another optimizer holds are divided."""
    never_since: int | None = None
    """They were never divided, since this iteration."""


class HandScale:
    """Follows such losses from their backward pass to the step."""

    def __init__(self) -> None:
        self._factor: float | None = None
        self._is_loss_scale = False
        """It can be nothing else."""
        self._never = NeverDivided()
        self._scaled: dict[OptimizerWatch, _Scaled] = {}
        self._loose: LooseGradients | None = None
        self._sources: list[_Scaled] = []
        """Of those that no optimizer holds: what was clipped before it is copied to masters."""
        self._divides: weakref.WeakKeyDictionary[OptimizerWatch, list[float]] = weakref.WeakKeyDictionary()
        """By which scales the gradients of an optimizer were seen to be divided, in one step after the other."""
        self._divided_now: list[float] = []
        """The same of all optimizers that have stepped since the last backward pass."""
        self._undivided_now: set[OptimizerWatch] = set()
        """Those that have begun a step since the last backward pass, with undivided gradients."""
        self._divides_within: weakref.WeakSet[OptimizerWatch] = weakref.WeakSet()
        """Those whose own step divides, and then calls the one that it inherits."""
        self.roots: Callable[[], Iterable[Iterable[Tensor]]] = tuple
        """The parameters of each module that was called."""

    @property
    def is_open(self) -> bool:
        return bool(self._scaled) or self._loose is not None

    def before_backward(self, losses: Any, has_hooks: bool) -> None:
        """By which constant was the loss multiplied? `has_hooks`: the script has put some into its graph."""
        loss = losses if isinstance(losses, Tensor) else None
        factors = [f for f in constant_factors(loss) if f >= SMALLEST_SCALE] if loss is not None else []
        self._factor = max(factors, default=None)
        self._is_loss_scale = False
        if loss is not None and self._factor is not None and not has_hooks:
            self._is_loss_scale = is_loss_scale(loss, self._factor)

    def after_backward(self, reached: tuple[OptimizerWatch, ...], where: Line | None) -> None:
        """Keep one gradient of each optimizer that was reached; where none was, those that will be copied to masters."""
        factor, self._factor = self._factor, None
        self._loose, self._sources, self._divided_now, self._undivided_now = None, [], [], set()
        if factor is None:
            return
        for watch in reached:
            held = [p for p in watch.sample if _is_small(p)]
            if held:
                p = min(held, key=lambda p: p.numel())
                assert p.grad is not None
                with torch.no_grad(), compat.unseen():
                    kept = compat.local_part(p.grad.detach()).flatten().clone()
                    self._scaled[watch] = _Scaled(factor, where, p, kept)
        if not reached:
            self._loose = LooseGradients.of(self.roots(), factor, where)

    def forget(self) -> None:
        """An iteration that is looked at closely is over."""
        self._scaled.clear()
        self._loose, self._sources = None, []

    def before_clip(self, watches: Iterable[OptimizerWatch]) -> None:
        """What was divided before it is clipped was clipped rightly."""
        self._follow_copies(watches)
        done = [w for w, scaled in self._scaled.items() if _is(scaled.ratio(), scaled.scale)]
        for watch in done:
            del self._scaled[watch]
        self._sources = [s for s in self._sources if s.parameter.grad is not None and not _is(s.ratio(), s.scale)]

    def _follow_copies(self, watches: Iterable[OptimizerWatch]) -> None:
        """Gradients that were copied to masters since the backward pass are followed there."""
        loose = self._loose
        if loose is None:
            return
        if not self._sources:
            held = [(s.parameter(), s.kept) for s in loose.sources]
            self._sources = [_Scaled(loose.scale, loose.where, p, kept) for p, kept in held if p is not None]
        for watch in watches:
            found = loose.in_masters(watch.parameters()) if watch not in self._scaled else None
            if found is not None and not _is(found.ratio, loose.scale):
                self._scaled[watch] = scaled = _Scaled(loose.scale, loose.where, found.master, found.source.kept)
                scaled.keep()

    def after_clip(self, watches: list[OptimizerWatch], limit: float | None, where: Line | None) -> None:
        """Gradients were clipped to `limit`; those that became smaller by it still carried their scale."""
        for scaled in [s for w in watches if (s := self._scaled.get(w)) is not None]:
            scaled.clipped(limit, where)
        for scaled in self._sources:
            scaled.clipped(limit, where)

    def undivided(self, watch: OptimizerWatch, step: int) -> Undivided | None:
        """The gradients with which an optimizer is about to step, where they should have been divided."""
        scaled, loose = self._scaled.get(watch), self._loose
        if scaled is not None:
            ratio, scale, where = scaled.ratio() if not scaled.clips else None, scaled.scale, scaled.where
        elif loose is not None and not any(each.clips for each in self._sources):
            found = loose.in_masters(watch.parameters())
            ratio, scale, where = found.ratio if found is not None else None, loose.scale, loose.where
        else:
            return None
        divided = self._divides.setdefault(watch, [])
        if _is(ratio, scale):
            self._divided_now.append(scale)
            if watch in self._undivided_now:
                self._divides_within.add(watch)
            if len(divided) < MOST_DIVISIONS:
                divided.append(scale)
        # (A weight of one term is no scale: those are powers of two as a rule.)
        is_power = math.frexp(scale)[0] == 0.5
        since = self._never.stepping(watch, scale, ratio, step) if self._is_loss_scale else None
        if not _is(ratio, 1.0) or watch in self._divides_within:
            return None
        self._undivided_now.add(watch)
        if len(divided) >= FEWEST_DIVISIONS and (is_power or scale in divided):
            return Undivided(scale, where)
        if is_power and self._is_divided_elsewhere(watch, scale):
            return Undivided(scale, where, is_beside=True)
        return Undivided(scale, where, never_since=since) if since is not None else None

    def _is_divided_elsewhere(self, watch: OptimizerWatch, scale: float) -> bool:
        """Whether gradients of the same loss were divided by its scale for another optimizer."""
        if scale in self._divided_now:
            return True
        others = [scaled for other, scaled in self._scaled.items() if other is not watch and not scaled.clips]
        return any(scaled.scale == scale and _is(scaled.ratio(), scale) for scaled in others)

    def stepping(self, watch: OptimizerWatch) -> ClippedScaled | None:
        """The optimizer is about to step: were its gradients divided only after they had been clipped?"""
        scaled = self._scaled.pop(watch, None)
        if scaled is None:
            scaled = self._copied_after_clip(watch)
        if scaled is None or not scaled.clips or not _is(scaled.ratio(), scaled.scale):
            return None
        return ClippedScaled(scaled.scale, scaled.where, scaled.clips[0], scaled.made_smaller)

    def _copied_after_clip(self, watch: OptimizerWatch) -> _Scaled | None:
        """Gradients of a float16 model that were clipped before they were copied to this optimizer's masters."""
        clipped = [scaled for scaled in self._sources if scaled.clips]
        if self._loose is None or not clipped:
            return None
        now = LooseGradients(
            self._loose.scale, self._loose.where, [SourceGradient.of(s.parameter, s.kept) for s in clipped]
        )
        found = now.in_masters(watch.parameters())
        if found is None:
            return None
        of = next(s for s in clipped if s.kept is found.source.kept)
        return _Scaled(of.scale, of.where, found.master, of.kept, of.clips, of.made_smaller)


def is_round_multiple(limit: float, scale: float) -> bool:
    """Whether a limit was made by multiplying an ordinary one by the scale.

    >>> is_round_multiple(0.25 * 4096.0, 4096.0), is_round_multiple(5.0, 1024.0)
    (True, False)
    """
    ratio = limit / scale
    return ratio >= SMALLEST_LIMIT and ratio == float(f"{ratio:.3g}")


def _is(ratio: float | None, scale: float) -> bool:
    return ratio is not None and abs(ratio / scale - 1.0) < SAME


def _is_small(p: Tensor) -> bool:
    return p.grad is not None and not p.grad.is_sparse and p.numel() <= SMALL
