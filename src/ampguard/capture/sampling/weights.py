"""Weights and gradients around an optimizer's step, sampled: small slices of a few parameters, before and after.

A look reads the norms of all gradients and weights and copies at most 4,096 elements of a few parameters. Nothing of
the script's is written to, and no look is taken that the allowance does not pay for.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.sampling.allowance import Allowance
from ampguard.capture.sampling.later import NumbersLater
from ampguard.capture.sampling.rates import rate_of_optimizer
from ampguard.numerics import is_low_precision

FIRST_STEPS = frozenset({0, 1, 2, 4, 8, 16})
"""Looked at in every run: gradients that are flushed to zero are suspected at powers of 2, and a short run has no others."""
SHARE = 0.002
"""Of the training's time."""

SLICE = 4096
LAYERS_A_LOOK = 6
KEPT_SLICES = 16
LOW_PRECISION_STEPS = frozenset({16, 24, 32, 48})
"""Looked at as well where weights of low precision are trained: do they move at all? Counted from the first step of the
optimizer that has them, where it comes late (a model that is trained further in bfloat16)."""

LATE_OPTIMIZERS = 4
"""Optimizers that come late and are looked at in their first steps. A loop that makes one again and again is not slowed."""

LATE_STEPS = (1, 2, 4, 8)
"""Looked at as well, behind the first step of such an optimizer."""

SMALLEST_HALF = 2.0**-24
"""The smallest number above 0 that float16 has. Between 0 and 2**-14 it has the multiples of this and no others."""


@dataclass(slots=True)
class LayerSample:
    """What one look saw of a parameter. Counts are over `elements` sampled ones.

    `zeros`: gradient elements that are exactly 0. `faint`: gradient elements, as they were while scaled, that are 1 to
    8 times float16's smallest number, and not between these multiples: what float16 is about to lose. `active`:
    elements that have had a gradient since `since`; `stuck`: those of them that have not moved since then.
    """

    parameter: weakref.ref[Tensor]
    elements: int
    zeros: float = 0
    faint: float = 0
    active: float = 0
    stuck: float = 0
    stuck_now: float = 0
    active_now: float = 0
    since: int = 0


@dataclass(slots=True)
class WeightSample:
    """One look: `grad_norm` (unscaled) and `weight_norm` are over all parameters of the optimizer."""

    step: int
    optimizer: weakref.ref[Optimizer]
    rate: float
    grad_norm: float | None
    weight_norm: float | None
    update_ratio: float | None
    layers: list[LayerSample]


@dataclass(slots=True)
class _Slice:
    """A parameter's slice between before and after the step."""

    parameter: Tensor
    before: Tensor
    gradient: Tensor
    counts: list[Tensor]


@dataclass(slots=True)
class _First:
    """A low-precision slice when it was first seen, and which of its elements have had a gradient since."""

    parameter: weakref.ref[Tensor]
    step: int
    values: Tensor
    active: Tensor


class WeightSampling:
    """Takes looks at an optimizer's step."""

    def __init__(self, later: NumbersLater, on_sample: Callable[[WeightSample], None]) -> None:
        self.allowance = Allowance(SHARE, FIRST_STEPS)
        self.is_open = False
        self._later = later
        self._on_sample = on_sample
        self._asked: tuple[int, bool] = (-1, False)
        self._slices: list[_Slice] = []
        self._norm: Tensor | None = None
        self._ratios: list[Tensor] = []
        self._norms: list[Tensor] = []
        self.first: dict[int, _First] = {}
        self._low_since = 0
        self._late = 0
        self.late_steps: set[int] = set()
        """Steps that are looked at for an optimizer that has come late."""
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._turn = 0
        self._thread = 0
        """Whose step is looked at."""
        self._seconds = 0.0

    def is_due(self, step: int) -> bool:
        """Whether this iteration is looked at: all of its optimizers, or none."""
        if self._asked[0] != step:
            is_due = self.allowance.is_due(step) or step in self.late_steps
            is_due = is_due or (bool(self.first) and step - self._low_since in LOW_PRECISION_STEPS)
            self._asked = (step, is_due)
        return self._asked[1]

    def begins_late(self, optimizer: Optimizer, step: int) -> bool:
        """Whether this step, the first of an optimizer that has come late, is looked at; some of those behind it are then."""
        if self._late >= LATE_OPTIMIZERS:
            return False
        self._late += 1
        self.late_steps |= {step + behind for behind in LATE_STEPS}
        if any(is_low_precision(p.dtype) for p in watchable(optimizer)):
            self._low_since = step
        self._asked = (step, True)
        return True

    def before_update(
        self,
        optimizer: Optimizer,
        step: int,
        scale: Any,
        still_scaled: Tensor | None,
        given: Sequence[tuple[Any, Tensor]] | None = None,
    ) -> None:
        """Measure the gradients and keep slices of some weights. `scale`: by which the gradients were multiplied.

        `given`: weights and their gradients, where they are not in `.grad`.
        """
        if self.is_open and self._thread != get_ident() and self._asked[0] == step:
            return  # another thread's step is being looked at
        self._thread = get_ident()
        began = time.perf_counter()
        with_gradient = given or [(p, p.grad) for p in watchable(optimizer) if p.grad is not None]
        pairs = [(p, g) for p, g in with_gradient if g.layout == torch.strided]
        if not pairs:
            return
        with torch.no_grad():
            self._norm = norm_of([g for _, g in pairs])
            if still_scaled is not None and self._norm is not None:
                self._norm = self._norm / still_scaled
            factor = 1.0 if scale is None or still_scaled is not None else scale
            alike = [(p, g) for p, g in self._chosen(pairs) if p.stride() == g.stride()]
            self._slices = [self._sliced(p, g, factor) for p, g in alike]
        self.is_open = True
        self._asked = (step, True)
        self._seconds = time.perf_counter() - began

    def after_update(self, optimizer: Optimizer) -> None:
        """See what the step did to the slices, and hand the look on."""
        if self._thread != get_ident():
            return
        self.is_open = False
        began = time.perf_counter()
        step = self._asked[0]
        with torch.no_grad():
            layers, numbers = self._compare(step)
            weights = norm_of(list(watchable(optimizer)))
            ratio = self._ratio()
        if ratio is not None:
            self._ratios.append(ratio)
        if self._norm is not None:
            self._norms.append(self._norm)
        rate = rate_of_optimizer(optimizer)
        known = self._optimizer = weakref.ref(optimizer)

        def hand_on(values: list[float | None]) -> None:
            norm, weight_norm, moved, *counts = values
            for layer, position in zip(layers, range(0, len(counts), 6), strict=True):
                some = [0.0 if c is None else c for c in counts[position : position + 6]]
                layer.zeros, layer.faint, layer.active, layer.stuck, layer.active_now, layer.stuck_now = some
            self._on_sample(WeightSample(step, known, rate, norm, weight_norm, moved, layers))

        grad_norm, self._norm, self._slices = self._norm, None, []
        self.allowance.spend(self._seconds + time.perf_counter() - began)
        self._later.ask([grad_norm, weights, ratio, *numbers], hand_on)

    def update_ratio(self) -> Tensor | None:
        """The update-to-weight ratio of the iteration that ends, where it was looked at."""
        ratios, self._ratios = self._ratios, []
        return ratios[-1] if ratios else None

    def grad_norms(self) -> list[Tensor]:
        """The gradient norms of the iteration that ends, one an optimizer, where it was looked at."""
        norms, self._norms = self._norms, []
        return norms

    def last_look(self, step: int) -> WeightSample | None:
        """The kept slices once more, as they are at the end of the run. Waits for the device."""
        layers: list[LayerSample] = []
        known: Optimizer | None = self._optimizer() if self._optimizer is not None else None
        for first in tuple(self.first.values()):
            parameter = first.parameter()
            if parameter is None:
                continue
            stuck = first.active & (slice_of(parameter) == first.values)
            layer = LayerSample(first.parameter, first.values.numel(), since=first.step)
            layer.active = layer.active_now = float(first.active.sum())
            layer.stuck = layer.stuck_now = float(stuck.sum())
            layers.append(layer)
        if known is None or not layers:
            return None
        return WeightSample(step, weakref.ref(known), rate_of_optimizer(known), None, None, None, layers)

    def _chosen(self, pairs: list[tuple[nn.Parameter, Tensor]]) -> list[tuple[nn.Parameter, Tensor]]:
        """Some of the large ones, always the same; and one after the other, all."""
        large = [pair for pair in pairs if pair[0].dim() >= 2] or pairs
        spread = [large[i * (len(large) - 1) // 2] for i in range(3)]
        others = [pairs[(self._turn + i) % len(pairs)] for i in range(LAYERS_A_LOOK - len(spread))]
        self._turn = (self._turn + len(others)) % len(pairs)
        return list({id(p): (p, g) for p, g in (*spread, *others)}.values())

    def _sliced(self, parameter: Tensor, gradient: Tensor, factor: Any) -> _Slice:
        values = slice_of(parameter).clone()
        grads = slice_of(gradient).to(torch.float32)
        scaled = (grads * factor / SMALLEST_HALF).abs()
        faint = (scaled > 0.5) & (scaled < 8.5) & ((scaled - scaled.round()).abs() < 1e-2)
        return _Slice(parameter, values, grads, [(grads == 0).sum(), faint.sum()])

    def _compare(self, step: int) -> tuple[list[LayerSample], list[Tensor]]:
        layers: list[LayerSample] = []
        numbers: list[Tensor] = []
        for s in self._slices:
            layer = LayerSample(weakref.ref(s.parameter), s.before.numel(), since=step)
            zero = s.counts[0] * 0
            counts = [*s.counts, zero, zero, zero, zero]
            if is_low_precision(s.parameter.dtype):
                counts[2:] = self._stuck(s, layer, step)
            layers.append(layer)
            numbers += counts
        seen = {id(s.parameter) for s in self._slices}
        for first in tuple(self.first.values()):
            parameter = first.parameter()
            if parameter is not None and id(parameter) not in seen:
                stuck = (first.active & (slice_of(parameter) == first.values)).sum()
                active = first.active.sum()
                layers.append(LayerSample(first.parameter, first.values.numel(), since=first.step))
                numbers += [active * 0, active * 0, active, stuck, active, stuck]
        return layers, numbers

    def _stuck(self, s: _Slice, layer: LayerSample, step: int) -> list[Tensor]:
        """How many elements have a gradient and do not move: since the first look, and in this step."""
        now = slice_of(s.parameter)
        has_gradient = s.gradient != 0
        first = self.first.get(id(s.parameter))
        if first is None or first.parameter() is not s.parameter:
            if len(self.first) >= KEPT_SLICES:
                self.first = {key: known for key, known in self.first.items() if known.parameter() is not None}
            if len(self.first) >= KEPT_SLICES:
                same = has_gradient & (now == s.before)
                return [has_gradient.sum() * 0, same.sum() * 0, has_gradient.sum(), same.sum()]
            first = _First(weakref.ref(s.parameter), step, s.before, has_gradient.clone())
            self.first[id(s.parameter)] = first
        first.active |= has_gradient
        layer.since = first.step
        stuck = first.active & (now == first.values)
        return [first.active.sum(), stuck.sum(), has_gradient.sum(), (has_gradient & (now == s.before)).sum()]

    def _ratio(self) -> Tensor | None:
        """||update|| / ||weights|| over the slices."""
        slices = self._slices
        moved = [(slice_of(s.parameter).float() - s.before.float()).square().sum() for s in slices]
        sizes = [s.before.float().square().sum() for s in slices]
        if not moved:
            return None
        tiny = torch.finfo(torch.float32).tiny
        return (torch.stack(moved).sum() / torch.stack(sizes).sum().clamp_min(tiny)).sqrt()


def watchable(optimizer: Optimizer) -> list[nn.Parameter]:
    """The optimizer's plain floating-point parameters (none that live on several ranks, none without memory)."""
    return [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if type(p) in (nn.Parameter, Tensor) and p.is_floating_point() and p.layout == torch.strided and p.numel()
    ]


def norm_of(tensors: list[Any]) -> Tensor | None:
    """The 2-norm over all tensors, computed in float32; None where there is none, or where they lie apart."""
    dense = [t.detach() for t in tensors if t.layout == torch.strided and compat.has_values(t)]
    if not dense or len({t.device for t in dense}) > 1:
        return None
    if any(is_low_precision(t.dtype) for t in dense):
        norms = [torch.linalg.vector_norm(t, dtype=torch.float32) for t in dense]
    else:
        norms = compat.norms_of(dense)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def slice_of(tensor: Tensor) -> Tensor:
    """At most 4,096 elements spread over the tensor, the same ones in every look, as a view."""
    flat = tensor.detach()
    if not flat.is_contiguous():
        flat = flat.permute(*torch.tensor(flat.stride()).argsort(descending=True, stable=True).tolist())
    if flat.is_contiguous():
        flat = flat.view(-1)
        return flat[:: max(1, -(-flat.numel() // SLICE))]
    while flat.dim() > 1 and flat.numel() > SLICE:
        flat = flat[0]
    return flat.reshape(-1)[:SLICE]
