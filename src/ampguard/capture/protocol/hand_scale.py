"""A loss scale of the script's own, without any GradScaler: is a gradient clipped before it is divided?

A large constant by which a loss is multiplied may mean anything. It is a loss scale where the script also divides the
gradients by it before the optimizer's step; only then, and only if they were clipped in between, something is told.
In iterations that are looked at closely.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.gradients import SMALL, OptimizerWatch
from ampguard.capture.protocol.loss_scale import constant_factors
from ampguard.capture.record import Line

SMALLEST_SCALE = 8.0
SAME = 1e-2
CLIPPED = 1e-3
SMALLEST_LIMIT = 1e-3
"""Times the scale: a limit from there on that is a round multiple of it was multiplied by it."""


@dataclass(slots=True)
class _Scaled:
    """The gradients of one optimizer after the backward pass of such a loss; `kept`: one of them, as it was then."""

    scale: float
    where: Line | None
    parameter: Tensor
    kept: Tensor
    clips: list[Line | None] = field(default_factory=list)

    def ratio(self) -> float | None:
        """What it was over what it is now; None where that is not one number. Waits for the device."""
        now = self.parameter.grad
        if now is None or now.shape != self.kept.shape:
            return None
        with torch.no_grad(), compat.unseen():
            a, b = self.kept.double().flatten(), now.detach().double().flatten()
            square = float(b @ b)
            if not square or not bool(a.isfinite().all()):
                return None
            ratio = float(a @ b) / square
            return ratio if float((a - ratio * b).norm()) <= SAME * float(a.norm()) else None

    def keep(self) -> None:
        if self.parameter.grad is not None:
            with torch.no_grad(), compat.unseen():
                self.kept = self.parameter.grad.detach().clone()


@dataclass(frozen=True, slots=True)
class ClippedScaled:
    """Gradients were clipped while they carried a scale of the script's own."""

    scale: float
    backward: Line | None
    clip: Line | None


class HandScale:
    """Follows such losses from their backward pass to the step."""

    def __init__(self) -> None:
        self._factor: float | None = None
        self._scaled: dict[OptimizerWatch, _Scaled] = {}

    @property
    def is_open(self) -> bool:
        return bool(self._scaled)

    def before_backward(self, losses: Any) -> None:
        """By which constant was the loss multiplied?"""
        loss = losses if isinstance(losses, Tensor) else None
        factors = [f for f in constant_factors(loss) if f >= SMALLEST_SCALE] if loss is not None else []
        self._factor = max(factors, default=None)

    def after_backward(self, reached: tuple[OptimizerWatch, ...], where: Line | None) -> None:
        """Keep one gradient of each optimizer that was reached."""
        factor, self._factor = self._factor, None
        for watch in reached if factor is not None else ():
            held = [p for p in watch.sample if _is_small(p)]
            if held:
                p = min(held, key=lambda p: p.numel())
                assert p.grad is not None
                assert factor is not None
                with torch.no_grad(), compat.unseen():
                    self._scaled[watch] = _Scaled(factor, where, p, p.grad.detach().clone())

    def forget(self) -> None:
        """An iteration that is looked at closely is over."""
        self._scaled.clear()

    def before_clip(self) -> None:
        """What was divided before it is clipped was clipped rightly."""
        done = [w for w, scaled in self._scaled.items() if _is(scaled.ratio(), scaled.scale)]
        for watch in done:
            del self._scaled[watch]

    def after_clip(self, watches: list[OptimizerWatch], limit: float | None, where: Line | None) -> None:
        """Gradients were clipped to `limit`; those that became smaller by it still carried their scale."""
        for scaled in [s for w in watches if (s := self._scaled.get(w)) is not None]:
            ratio = scaled.ratio()
            knows_scale = limit is not None and is_round_multiple(limit, scaled.scale)
            if (ratio is None or ratio > 1.0 + CLIPPED) and not knows_scale:
                scaled.clips.append(where)
            scaled.keep()

    def stepping(self, watch: OptimizerWatch) -> ClippedScaled | None:
        """The optimizer is about to step: were its gradients divided only after they had been clipped?"""
        scaled = self._scaled.pop(watch, None)
        if scaled is None or not scaled.clips or not _is(scaled.ratio(), scaled.scale):
            return None
        return ClippedScaled(scaled.scale, scaled.where, scaled.clips[0])


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
