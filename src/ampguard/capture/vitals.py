"""The vital signs of a training, one set per iteration: loss, loss scale, gradient norm, skipped or not, seconds.

Only what the script computes anyway is looked at in every step; on a device it is read later (see `later`). What
costs more (see `weights`) is sampled under an allowance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.flags import is_capturing
from ampguard.capture.later import NumbersLater
from ampguard.capture.weights import WeightSample, WeightSampling


@dataclass(slots=True)
class StepVitals:
    """One iteration. None is "not measured"; a number may be NaN or infinite.

    `loss`: the sum of the losses that were differentiated. `scale`: the loss scale in use. `grad_norm`: over all
    gradients, unscaled. `update_ratio`: ||update|| / ||weights|| of the sampled weights.
    """

    step: int
    loss: float | None = None
    scale: float | None = None
    grad_norm: float | None = None
    skipped: bool | None = None
    update_ratio: float | None = None
    seconds: float | None = None


class Vitals:
    """Collects the vital signs of the running iteration and hands them on when it ends."""

    def __init__(self, on_step: Callable[[StepVitals], None], on_sample: Callable[[WeightSample], None]) -> None:
        self._on_step = on_step
        self._later = NumbersLater()
        self.weights = WeightSampling(self._later, on_sample)
        self._losses: list[Tensor | float] = []
        self._norms: list[Tensor | float] = []
        self._scale: Tensor | float | None = None
        self._scaler: Any = None
        self._is_unscaled = False
        self._skips: list[Tensor | bool] = []
        self._started = time.perf_counter()
        self._step = 0

    def loss_seen(self, loss: Tensor | float) -> None:
        """A loss, unscaled, is about to be differentiated."""
        if isinstance(loss, float):
            self._losses.append(loss)
        elif loss.numel() == 1 and not loss.is_complex() and compat.has_values(loss) and not is_capturing():
            self._losses.append(loss.item() if loss.device.type == "cpu" else loss.detach())

    def scaler_used(self, scaler: Any) -> None:
        """The loss was scaled: gradients are scaled from here until `unscaled`."""
        self._scaler = scaler
        self._is_unscaled = False

    def unscaled(self) -> None:
        """The scaler has divided the gradients by the scale."""
        self._is_unscaled = True

    def norm_seen(self, norm: Tensor | float) -> None:
        """The script measured its gradients (`clip_grad_norm_`); it is divided by the scale where they are scaled."""
        if isinstance(norm, Tensor) and (norm.numel() != 1 or not compat.has_values(norm) or is_capturing()):
            return
        scale = None if self._is_unscaled else self._scale_now()
        value = norm.detach() if isinstance(norm, Tensor) else norm
        value = value.item() if isinstance(value, Tensor) and value.device.type == "cpu" else value
        self._norms.append(value if scale is None else value / scale)

    def before_update(self, optimizer: Optimizer, by_scaler: bool) -> None:
        """The optimizer is about to change its parameters; a step that the scaler skips does not come here."""
        if self.weights.is_due(self._step) and not is_capturing():
            scale = self._scale_now() if by_scaler else None
            still_scaled = compat.held_scale(optimizer) if by_scaler else None
            self.weights.before_update(optimizer, self._step, scale, still_scaled)

    def after_update(self, optimizer: Optimizer, skipped: Tensor | bool) -> None:
        """An optimizer's step was attempted. `skipped` as a tensor: not zero where the optimizer skipped it itself."""
        if isinstance(skipped, Tensor):
            skipped = bool(skipped.item()) if skipped.device.type == "cpu" else skipped.detach()
        self._skips.append(skipped)
        self._scale = self._scale_now()
        if self.weights.is_open:
            self.weights.after_update(optimizer)

    def iteration_ended(self, step: int, seconds_of_ours: float = 0.0) -> None:
        """Iteration number `step` is over."""
        now = time.perf_counter()
        self._norms = self._norms or list(self.weights.grad_norms())
        numbers = (*self._losses, *self._norms, *self._skips, self._scale, self.weights.update_ratio())
        seconds = max(0.0, now - self._started - seconds_of_ours)
        losses, norms, skips = len(self._losses), len(self._norms), len(self._skips)
        self._losses, self._norms, self._skips = [], [], []
        self._scale = None
        self._started = now
        self._step = step + 1

        def hand_on(values: list[float | None]) -> None:
            self._on_step(
                StepVitals(
                    step,
                    _total(values[:losses]),
                    values[-2],
                    _root_of_squares(values[losses : losses + norms]),
                    _any(values[losses + norms : losses + norms + skips]),
                    values[-1],
                    seconds,
                )
            )

        self._later.ask(numbers, hand_on)

    def restart_clock(self) -> None:
        """Time that ampguard itself took does not count as the script's."""
        self._started = time.perf_counter()

    def close(self) -> None:
        """The run ends: what is still under way is waited for."""
        self._later.poll(wait=True)

    def _scale_now(self) -> Tensor | float | None:
        """The loss scale; a tensor where it lies on a device."""
        scaler = self._scaler
        scale = compat.loss_scale(scaler) if scaler is not None else None
        if scale is None:
            return None
        return float(scale.item()) if scale.device.type == "cpu" else scale.detach().clone()


def _total(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _root_of_squares(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return (abs(known[0]) if len(known) == 1 else math.hypot(*known)) if known else None


def _any(values: list[float | None]) -> bool | None:
    return any(values) if values else None


def is_watchable(tensors: Any) -> bool:
    """Whether what is differentiated is one number on a real device."""
    return isinstance(tensors, Tensor) and tensors.numel() == 1 and not torch.compiler.is_compiling()
