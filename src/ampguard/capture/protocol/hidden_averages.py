"""Averages of weights that a module writes in its own forward pass, where no operator is recorded (MoCo's key encoder).

What they are made of is not seen, but rounding leaves a mark: an element moves only where it is far from the trained weight
that it follows, and then towards it; nearer ones stand still, though all of them are written in each step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.sampling.weights import slice_of
from ampguard.numerics import is_low_precision

DEEPEST = 3
"""Parts of a name, from its beginning, one of which may tell an average from what it is one of."""
FEWEST_MOVED = 16
"""Elements; of fewer nothing is said."""
TOWARDS = 0.95
"""Share of the moved ones that have come nearer to the weight."""
STAND_STILL = 0.5
"""Share of all elements that stand still although they are more than the distance of two numbers away."""
NEARER = 0.9
"""Share of those that are nearer, counted in such distances, than the moved ones mostly were."""


@dataclass(slots=True)
class Seen:
    """A frozen parameter when it was first seen, and the trained one that may be followed."""

    parameter: weakref.ref[Tensor]
    weight: weakref.ref[Tensor]
    step: int
    values: Tensor
    memory: int
    reserved: object
    """Keeps that memory's key from being given to another: `p.data = ...` in each step may get the first address again."""
    version: int

    @classmethod
    def of(cls, parameter: Tensor, weight: Tensor, step: int) -> Seen:
        values = slice_of(parameter).clone()
        memory, reserved = compat.storage_key(parameter), compat.reserve_storage_key(parameter)
        version = compat.version_of(parameter)
        return cls(weakref.ref(parameter), weakref.ref(weight), step, values, memory, reserved, version)

    def was_written(self, parameter: Tensor, step: int) -> bool:
        """In every step since, or given other memory."""
        is_written = compat.version_of(parameter) - self.version >= step - self.step
        return is_written or compat.storage_key(parameter) != self.memory


@dataclass(frozen=True, slots=True)
class StandsStill:
    """`share` of its elements; `step_size`: what would be added to one of them; `spacing`: the distance to the next number."""

    parameter: Tensor
    share: float
    step_size: float
    spacing: float
    since: int


def pairs(modules: Iterable[nn.Module], largest: int, most: int) -> list[tuple[Tensor, Tensor]]:
    """Frozen parameters of low precision, each with the trained one that stands at the same place of another module."""
    found: list[tuple[Tensor, Tensor]] = []
    for module in modules:
        named = [
            (name, p)
            for name, p in compat.named_parameters(module).items()
            if is_low_precision(p.dtype) and p.dim() > 1
        ]
        trained = {place: p for name, p in named if p.requires_grad for place in _places(name)}
        for name, p in named:
            at = next((place for place in _places(name) if place in trained), None)
            if at is not None and not p.requires_grad and p.numel() <= largest and trained[at].shape == p.shape:
                found.append((p, trained[at]))
    return found[:most]


def _places(name: str) -> list[tuple[int, str]]:
    """`net.teacher.0.weight` and `net.student.0.weight` stand at the same place: their names differ in one part."""
    parts = name.split(".")
    return [(i, ".".join((*parts[:i], *parts[i + 1 :]))) for i in range(min(DEEPEST, len(parts) - 1))]


def stands_still(seen: Seen, step: int) -> StandsStill | None:
    """Whether rounding keeps it where it was. None too where it cannot be told. Waits for the device."""
    parameter, weight = seen.parameter(), seen.weight()
    if parameter is None or weight is None or not seen.was_written(parameter, step):
        return None
    now, first, followed = (t.float() for t in (slice_of(parameter), seen.values, slice_of(weight)))
    info = torch.finfo(parameter.dtype)
    spacing = torch.exp2(torch.floor(torch.log2(first.abs().clamp_min(float(info.tiny))))) * info.eps
    moved = now != first
    away = (followed - first).abs() / spacing
    still = ~moved & (away > 1.0)
    share = float(still.float().mean())
    if int(moved.sum()) < FEWEST_MOVED or share <= STAND_STILL or not bool(followed.isfinite().all()):
        return None
    towards = ((now - first).sign() == (followed - first).sign())[moved].float().mean()
    bound = away[moved].median()
    if float(towards) < TOWARDS or float((away[still] < bound).float().mean()) < NEARER:
        return None
    # Half a distance is rounded up: what lies nearer than the nearest that have moved gets less of it.
    part = 0.5 / float(away[moved].quantile(0.1).clamp_min(1.0))
    size = part * float((followed - first).abs()[still].median())
    return StandsStill(parameter, share, size, float(spacing[still].median()), seen.step)
