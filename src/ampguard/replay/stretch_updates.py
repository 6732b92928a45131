"""The updates of a stretch that is run again, made on copies of the weights: as they were made, or otherwise.

What a script does to its gradients between backward and the update is not recorded: where the norm of what the optimizer
used is below that of the replayed ones, they were clipped, and the replay clips at the same norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat, numerics
from ampguard.capture.events.operands import leaves
from ampguard.capture.record import Ref
from ampguard.capture.sampling.copies import distance, parameters_of
from ampguard.capture.sampling.rates import rate_of
from ampguard.capture.sampling.stretch import Stretch, Update
from ampguard.capture.sampling.weights import norm_of
from ampguard.errors import ReplayError

SAME_NORM = 1e-4
"""Relative difference between two norms that are the same but for rounding."""
SAME_LIMIT = 0.01


@dataclass(frozen=True, slots=True)
class Change:
    """How the updates differ from those that were made.

    `rate_factor` multiplies the learning rates, `max_rate` bounds them; `max_norm` is what the gradients of each
    optimizer are clipped to (by their 2-norm). Where one of several optimizers is asked about, only its updates are
    changed, unless it is `of_all`.
    """

    rate_factor: float = 1.0
    max_rate: float | None = None
    max_norm: float | None = None
    of_all: bool = False


AS_IT_RAN = Change()


class Copies:
    """The weights, buffers, optimizers and results that one replay of a stretch carries from step to step."""

    def __init__(self, stretch: Stretch) -> None:
        self.parameters, self.optimizers = stretch.snapshot.stand_ins()
        self.originals = [original for original, _ in stretch.snapshot.pairs()]
        updated = [{id(p) for p in parameters_of([optimizer])} for optimizer in self.optimizers]
        self.owned = [[p for p in self.originals if id(self.parameters[id(p)]) in theirs] for theirs in updated]
        """For each optimizer, the script's own tensors that it updates."""
        self.buffers: dict[tuple[int, str], Tensor] = {}
        """By the dict that holds a buffer, and its name."""
        self.made: dict[Ref, Tensor] = {}
        later: set[Ref] = set()
        for step in stretch.steps:
            for event in step.record.events:
                refs = (leaf for leaf in leaves((event.args, event.kwargs)) if isinstance(leaf, Ref))
                later |= {ref for ref in refs if ref.event < step.record.iteration_start}
        self.handed_on = later
        """Results that a later step uses."""

    def take_present(self) -> None:
        """Give the copies the values that the script's own weights have now."""
        with torch.no_grad():
            for original in self.originals:
                self.parameters[id(original)].copy_(original)

    def apart(self) -> float | None:
        """How far the copied weights are from the script's, relative to those."""
        return distance([(self.parameters[id(original)], original) for original in self.originals])


@dataclass(slots=True)
class Updates:
    """How the updates of one replay of a stretch are made."""

    change: Change
    only: int | None
    """Of several optimizers the one that is asked about; None: all of them."""
    limits: dict[int, float]
    """For each optimizer whose gradients the script clips: at which norm."""
    norms: list[tuple[int, float, float]]
    """(optimizer, norm of the replayed gradients, norm of those that were used), of those that were made as they were."""

    def make(self, update: Update, copies: Copies, gradients: dict[int, Tensor]) -> bool:
        """One optimizer's step on the copies. False where these gradients are not finite, and it is skipped."""
        optimizer, owned = copies.optimizers[update.optimizer], copies.owned[update.optimizer]
        with torch.no_grad():
            if update.scale is not None:
                gradients = {key: g * (1.0 / update.scale) for key, g in gradients.items()}
            if not all(numerics.is_finite(g) for g in gradients.values()):
                return False
            gradients = self._clipped(gradients, update)
        for parameter in owned:
            copies.parameters[id(parameter)].grad = gradients.get(id(parameter))
        self._set_options(optimizer, update)
        try:
            compat.step_without_hooks(optimizer)(optimizer)
        finally:
            for parameter in owned:
                copies.parameters[id(parameter)].grad = None
        return True

    def _clipped(self, gradients: dict[int, Tensor], update: Update) -> dict[int, Tensor]:
        """The gradients as the optimizer was given them; with a change, clipped where the script or the change does."""
        norm = norm_of(list(gradients.values()))
        if norm is None or not float(norm):
            return gradients
        size = float(norm)
        factor = 1.0
        if self.change is AS_IT_RAN:
            used = update.grad_norm
            if used is not None and math.isfinite(used):
                self.norms.append((update.optimizer, size, used))
                factor = used / size if abs(used - size) > SAME_NORM * size else 1.0
        else:
            bounds = (self.limits.get(update.optimizer), self.change.max_norm if self._is_asked(update) else None)
            limit = min((bound for bound in bounds if bound is not None), default=math.inf)
            factor = min(1.0, limit / size)
        return gradients if factor == 1.0 else {key: g * factor for key, g in gradients.items()}

    def _is_asked(self, update: Update) -> bool:
        """Whether it is this optimizer's updates that are changed."""
        return self.only is None or self.change.of_all or update.optimizer == self.only

    def _set_options(self, optimizer: Optimizer, update: Update) -> None:
        for group, options in zip(optimizer.param_groups, update.options, strict=True):
            group.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()})
            if "lr" in group and self.change is not AS_IT_RAN and self._is_asked(update):
                rate = group["lr"] * self.change.rate_factor
                highest = self.change.max_rate
                if highest is not None and rate_of(rate) > highest:
                    rate = rate.clamp(max=highest) if isinstance(rate, Tensor) else highest
                group["lr"] = rate


def limits_of(norms: list[tuple[int, float, float]]) -> dict[int, float]:
    """At which norm the gradients of each optimizer were clipped, from (optimizer, norm before, norm used).

    Raises ReplayError where they were changed in another way.
    """
    limits: dict[int, float] = {}
    for number in {n for n, _, _ in norms}:
        mine = [(before, used) for n, before, used in norms if n == number]
        clipped = [used for before, used in mine if used < before * (1 - SAME_NORM)]
        if not clipped and all(used <= before * (1 + SAME_NORM) for before, used in mine):
            continue
        limit = max(clipped, default=0.0)
        is_one_limit = clipped and min(clipped) >= (1 - SAME_LIMIT) * limit
        if not is_one_limit or any(used > limit * (1 + SAME_LIMIT) for _, used in mine):
            raise ReplayError("something other than clipping changed the gradients between backward and the update")
        limits[number] = limit
    return limits
