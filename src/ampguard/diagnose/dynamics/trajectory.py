"""Trajectory: a run's course so far, in bounded memory: the last steps one by one, older ones thinned out."""

from __future__ import annotations

import copy
import math
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from torch.optim import Optimizer

from ampguard.capture.sampling.vitals import StepVitals
from ampguard.capture.sampling.weights import LayerSample, WeightSample
from ampguard.numerics import largest
from ampguard.replay.activations import Peaks, Place

RECENT_STEPS = 1024
THINNED = 512
POINTS_A_PLACE = 96
MAX_PLACES = 4096
WATCHED = 0.01
"""Share of its limit from which on an activation is watched more closely if it grows."""
WATCHED_PLACES = 32

KEPT_LOOKS = 64


class Thinned:
    """At most `size` points of a series of any length, evenly spaced over the steps: when full, every other one goes."""

    def __init__(self, size: int = THINNED) -> None:
        self._size = size
        self._stride = 1
        self._count = 0
        self.points: list[tuple[int, float]] = []

    def add(self, step: int, value: float) -> None:
        if self._count % self._stride == 0:
            self.points.append((step, value))
        self._count += 1
        if len(self.points) >= self._size:
            del self.points[1::2]
            self._stride *= 2


@dataclass(slots=True)
class Peak:
    """The sampled maxima of one place, and the learning rate at each sample."""

    steps: deque[int] = field(default_factory=lambda: deque(maxlen=POINTS_A_PLACE))
    sizes: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS_A_PLACE))
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS_A_PLACE))


class OwnLosses:
    """The losses that came before the updates of one of several optimizers, each an iteration's."""

    def __init__(self, optimizer: weakref.ref[Optimizer]) -> None:
        self.optimizer = optimizer
        self.recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        self.thinned = Thinned()

    def add(self, step: int, loss: float) -> None:
        self.recent.append((step, loss))
        self.thinned.add(step, loss)


class Trajectory:
    """What the rules read. Only finite numbers enter a series."""

    def __init__(self) -> None:
        self.turns: dict[int, OwnLosses] = {}
        """Of each optimizer, by its identity, where several step in an iteration."""
        self.order: tuple[int, ...] = ()
        """The optimizers that stepped in the last such iteration, one after the other."""
        self.recent: deque[StepVitals] = deque(maxlen=RECENT_STEPS)
        self.losses = Thinned()
        self.norms = Thinned()
        self.peaks: dict[Place, Peak] = {}
        self.first_looks: dict[int, WeightSample] = {}
        """Of each optimizer, by its identity."""
        self.looks: deque[WeightSample] = deque(maxlen=KEPT_LOOKS)
        self.layers: dict[int, LayerSample] = {}
        """The newest look at each parameter, by the parameter's identity."""
        self.skips_in_a_row = 0
        self.falling_since: int | None = None
        """The step at which the present fall of the loss scale began, with the scale it began from in `scale_before`."""
        self.scale_before: float | None = None
        self.bad_losses_in_fall = 0
        self.attempts_in_fall = 0
        self.skips_in_fall = 0

    def add(self, vitals: StepVitals) -> None:
        """An iteration ended."""
        self.recent.append(vitals)
        if is_number(vitals.loss):
            self.losses.add(vitals.step, vitals.loss)
        if vitals.grad_norm is not None and is_number(vitals.grad_norm):
            self.norms.add(vitals.step, vitals.grad_norm)
        if vitals.skipped or (vitals.skipped is False and (self.skips_in_a_row or self.falling_since is not None)):
            self._follow_scale(vitals)

    def add_turns(self, step: int, turns: Sequence[tuple[weakref.ref[Optimizer], float]]) -> None:
        """An iteration ended in which several optimizers stepped, each after a loss of its own."""
        live = [optimizer() for optimizer, _ in turns]
        self.order = tuple(0 if optimizer is None else id(optimizer) for optimizer in live)
        own: dict[int, float] = {}
        for key, (optimizer, loss) in zip(self.order, turns, strict=True):
            if not key:
                continue  # the script has dropped it since
            if key not in self.turns or self.turns[key].optimizer is not optimizer:
                self.turns = {k: o for k, o in self.turns.items() if o.optimizer() is not None}
                self.turns[key] = OwnLosses(optimizer)
            own[key] = own.get(key, 0.0) + loss
        for key, loss in own.items():
            if math.isfinite(loss):
                self.turns[key].add(step, loss)

    def of(self, optimizer: Optimizer) -> Trajectory:
        """The same course with the losses of one optimizer instead of their sums."""
        own = self.turns[id(optimizer)]
        losses = dict(own.recent)
        view = copy.copy(self)
        view.losses = own.thinned
        view.recent = deque((v._replace(loss=losses.get(v.step)) for v in self.recent), maxlen=RECENT_STEPS)
        return view

    def look(self, sample: WeightSample) -> None:
        """A look at the weights was taken."""
        optimizer = sample.optimizer()
        if optimizer is not None and sample.weight_norm:
            known = self.first_looks.get(id(optimizer))
            if known is None or known.optimizer() is not optimizer:
                alive = {key: look for key, look in self.first_looks.items() if look.optimizer() is not None}
                self.first_looks = {**alive, id(optimizer): sample}
        self.looks.append(sample)
        if len(self.layers) > MAX_PLACES:
            self.layers.clear()
        for layer in sample.layers:
            parameter = layer.parameter()
            if parameter is not None:
                self.layers[id(parameter)] = layer

    def activations(self, step: int, peaks: Peaks, rate: float) -> None:
        """The maxima of a sampled step."""
        for place, size in peaks.items():
            known = self.peaks.get(place)
            if known is None:
                if len(self.peaks) >= MAX_PLACES:
                    continue
                known = self.peaks[place] = Peak()
            known.steps.append(step)
            known.sizes.append(size)
            known.rates.append(rate)

    def watched_peaks(self) -> list[Peak]:
        """The activations that are nearest to their limit, as far as they are not negligible beside it."""
        near = [(p.sizes[-1] / largest(place.dtype), p) for place, p in self.peaks.items() if p.sizes]
        near = sorted((item for item in near if item[0] > WATCHED), key=lambda item: -item[0])
        return [peak for _, peak in near[:WATCHED_PLACES]]

    def loss_series(self) -> list[tuple[int, float]]:
        """Finite losses: thinned ones from the beginning, then all of the last steps."""
        recent = [(v.step, v.loss) for v in self.recent if is_number(v.loss)]
        first = recent[0][0] if recent else math.inf
        return [(s, x) for s, x in self.losses.points if s < first] + recent

    def has_come_down(self, rose: int, failed: int, best: float = math.inf) -> bool:
        """Whether a loss after step `failed` was as low as those before step `rose`; as `best`, where none is known."""
        series = self.loss_series()
        before = [loss for step, loss in series if step < rose]
        limit = max(before, default=best)
        return limit == math.inf or any(step > failed and loss <= limit for step, loss in series)

    def recent_norms(self) -> list[tuple[int, float]]:
        return [(v.step, v.grad_norm) for v in self.recent if is_number(v.grad_norm)]

    def used_scales(self) -> Iterator[tuple[int, float, bool]]:
        """Of the last steps: number, loss scale, skipped."""
        return ((v.step, v.scale, bool(v.skipped)) for v in self.recent if v.scale is not None)

    def _follow_scale(self, vitals: StepVitals) -> None:
        """A fall begins with a skipped step and is over when half of a run of steps succeeds."""
        if not vitals.skipped:
            self.skips_in_a_row = 0
            if self.falling_since is not None:
                self.attempts_in_fall += 1
                if self.attempts_in_fall > 2 * self.skips_in_fall:
                    self.falling_since = None
            return
        self.skips_in_a_row += 1
        if self.falling_since is None:
            self.falling_since, self.scale_before = vitals.step, vitals.scale
            self.attempts_in_fall = self.skips_in_fall = self.bad_losses_in_fall = 0
        self.attempts_in_fall += 1
        self.skips_in_fall += 1
        self.bad_losses_in_fall += vitals.loss is not None and not math.isfinite(vitals.loss)


def is_number(value: float | None) -> TypeGuard[float]:
    """Whether something was measured, and finite."""
    return value is not None and math.isfinite(value)
