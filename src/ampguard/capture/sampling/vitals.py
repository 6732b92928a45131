"""The vital signs of a training, one set per iteration: loss, loss scale, gradient norm, skipped or not, seconds.

Only what the script computes anyway is looked at in every step; on a device it is read later (see `later`). What
costs more (see `weights`) is sampled under an allowance.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.sampling.later import NumbersLater
from ampguard.capture.sampling.weights import WeightSample, WeightSampling
from ampguard.compat import cuda_is_capturing as is_capturing

AT_A_TIME = 16


class StepVitals(NamedTuple):
    """One iteration, as the history keeps it. None is "not measured"; a number may be NaN or infinite.

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

    def __init__(
        self,
        recorder: FlightRecorder,
        on_step: Callable[[StepVitals], None],
        on_sample: Callable[[WeightSample], None],
    ) -> None:
        self._recorder = recorder
        self._on_step = on_step
        self._later = NumbersLater()
        self.weights = WeightSampling(self._later, self._sampled(on_sample))
        self.looks = self.weights.is_due(0)
        """Whether weights and gradients are looked at in the running iteration."""
        self._norms: list[Tensor | float] = []
        self._skips: list[Tensor | bool] = []
        self._pending: list[StepVitals] = []
        self._started = time.perf_counter()
        self._step = 0

    def _sampled(self, on_sample: Callable[[WeightSample], None]) -> Callable[[WeightSample], None]:
        def hand_on(sample: WeightSample) -> None:
            self.flush()
            on_sample(sample)

        return hand_on

    def norm_seen(self, norm: Tensor | float) -> None:
        """The script measured its gradients (`clip_grad_norm_`); it is divided by the scale where they are scaled."""
        if isinstance(norm, Tensor):
            is_number = norm.numel() == 1 and compat.has_values(norm)
            if not is_number or (not norm.is_cpu and is_capturing()):
                return
        scale = None if self._recorder.scaling.is_unscaled else self._scale_now()
        value = norm.detach() if isinstance(norm, Tensor) else norm
        value = value.item() if isinstance(value, Tensor) and value.device.type == "cpu" else value
        self._norms.append(value if scale is None else value / scale)

    def begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to make its first step."""
        step = max(self._step, self._recorder.steps.count)
        if not self.looks and step and not is_capturing():
            self.looks = self.weights.begins_late(optimizer, step)

    def before_update(self, optimizer: Optimizer, by_scaler: bool) -> None:
        """The optimizer is about to change its parameters; a step that the scaler skips does not come here."""
        if self.looks and not is_capturing():
            scale = self._scale_now() if by_scaler else None
            still_scaled = compat.held_scale(optimizer) if by_scaler else None
            step = max(self._step, self._recorder.steps.count)  # the script may have skipped some by itself
            self.weights.before_update(optimizer, step, scale, still_scaled)

    def after_update(self, optimizer: Optimizer, skipped: Tensor | bool) -> None:
        """An optimizer's step was attempted. `skipped` as a tensor: not zero where the optimizer skipped it itself."""
        if isinstance(skipped, Tensor):
            skipped = bool(skipped.item()) if skipped.device.type == "cpu" else skipped.detach()
        self._skips.append(skipped)
        if self.weights.is_open:
            self.weights.after_update(optimizer)

    def stepped(self) -> None:
        """An optimizer stepped, and nothing of it is looked at."""
        self._skips.append(False)

    def iteration_ended(self, step: int, seconds_of_ours: float = 0.0) -> None:
        """Iteration number `step` is over. Ordinary ones are handed on some at a time: it costs less."""
        now = time.perf_counter()
        judge = self._recorder.judge
        losses, norms, skips = judge.losses, self._norms, self._skips
        judge.losses = []
        ratio: Tensor | None = None
        if self.looks:
            norms = norms or list(self.weights.grad_norms())
            ratio = self.weights.update_ratio()
        scale = self._scale_now()
        if scale is None and judge.own_scale.present is not None:
            scale = judge.own_scale.present
        if judge.skipped:
            self._skipped_by_script(step)
        seconds = max(0.0, now - self._started - seconds_of_ours)
        self._norms, self._skips = [], []
        self._started = now
        self._step = step + 1
        weights = self.weights
        may_look = step + 1 >= weights.allowance.not_before or weights.first or step + 1 in weights.late_steps
        self.looks = weights.is_due(step + 1) if may_look else False
        is_here = ratio is None and not self._later.waiting
        if is_here and len(losses) == len(skips) == 1 and type(skips[0]) is bool and len(norms) < 2:
            loss, norm = losses[0], norms[0] if norms else None
            if type(loss) is float and not isinstance(norm, Tensor) and (scale is None or type(scale) is float):
                self._pending.append(StepVitals(step, loss, scale, norm, skips[0], None, seconds))
                has_news = (skips[0] or loss - loss != 0.0) and not self._recorder.counting
                if len(self._pending) >= AT_A_TIME or has_news:
                    self.flush()
                return
        numbers = (*losses, *norms, *skips, scale, ratio)
        counts = len(losses), len(norms)
        if is_here and all(type(n) is not Tensor for n in numbers):
            self._wait(_vitals_of(step, seconds, counts, numbers))
            return
        self.flush()
        self._later.ask(numbers, lambda values: self._on_step(_vitals_of(step, seconds, counts, values)))

    def _skipped_by_script(self, step: int) -> None:
        """Iterations before number `step` may have ended without an optimizer's step."""
        skipped = self._recorder.judge.take_skipped()
        if skipped:
            self.flush()
        for number, losses in enumerate(skipped, step - len(skipped)):
            self._later.ask(losses, functools.partial(self._tell_skipped, number))

    def _tell_skipped(self, step: int, losses: list[float | None]) -> None:
        self._on_step(StepVitals(step, _total(losses), skipped=True))

    def _wait(self, vitals: StepVitals) -> None:
        """Hand these on with others, unless there is something to tell."""
        self._pending.append(vitals)
        loss = vitals.loss
        has_news = vitals.skipped or (loss is not None and loss - loss != 0.0)
        if len(self._pending) >= AT_A_TIME or (has_news and not self._recorder.counting):
            self.flush()

    @property
    def waiting(self) -> tuple[StepVitals, ...]:
        """The iterations that are yet to be handed on."""
        return tuple(self._pending)

    def flush(self) -> None:
        """Hand on the iterations that are waiting."""
        pending, self._pending = self._pending, []
        for vitals in pending:
            self._on_step(vitals)

    def close(self) -> None:
        """The run ends: what is still under way is waited for."""
        self._skipped_by_script(self._recorder.steps.count)
        self.flush()
        self._later.poll(wait=True)

    def _scale_now(self) -> Tensor | float | None:
        """The loss scale; a tensor where it lies on a device."""
        scaler = self._recorder.scaling.scaler
        scale = compat.loss_scale(scaler) if scaler is not None else None
        if scale is None:
            return None
        return float(scale.item()) if scale.is_cpu else scale.detach().clone()


def _vitals_of(step: int, seconds: float, counts: tuple[int, int], values: Sequence[Any]) -> StepVitals:
    """`values`: the losses, the norms (`counts` of each), for each attempted step whether it was skipped, scale, ratio."""
    losses, norms = counts
    return StepVitals(
        step,
        _total(values[:losses]),
        values[-2],
        _root_of_squares(values[losses : losses + norms]),
        _any(values[losses + norms : -2]),
        values[-1],
        seconds,
    )


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _root_of_squares(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return (abs(known[0]) if len(known) == 1 else math.hypot(*known)) if known else None


def _any(values: Sequence[float | None]) -> bool | None:
    return any(values) if values else None
