"""When is growth of weights out of proportion? Weights that began at or near zero grow many times over in health.

Zero-initialised heads, adapters, gains of residual branches and temperatures start at 0 on purpose. Their growth is
measured against the size that weights of their shapes ordinarily have, and against what updates of the usual size add up
to, never against what they began with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from statistics import median

from torch import Tensor
from torch.optim import Optimizer

from ampguard.capture.sampling.weights import WeightSample, watchable
from ampguard.diagnose.dynamics.trajectory import is_number

NEAR_ZERO = 0.1
"""Share of the ordinary norm below which weights have yet to grow."""
MOVED_FAR = 0.5
"""Share of the weights' norm, or of their ordinary one, by which no update moves them in health."""
WHOLE = 1.0
"""Relative size up to which an update of weights near zero is a usual one: the second is as large as the first."""


def ordinary_norm(parameters: Iterable[Tensor]) -> float:
    """The norm that weights of these shapes ordinarily have: rms 1 / sqrt(3 fan_in), PyTorch's own start.

    Vectors and scalars have no such scale; they count, as 1, only where there is nothing else.
    """
    shapes = [(p.numel(), p.shape) for p in parameters]
    matrices = sum(shape[0] / 3 for _, shape in shapes if len(shape) >= 2)
    return math.sqrt(matrices or sum(count for count, _ in shapes))


def is_near_zero(norm: float, parameters: Iterable[Tensor]) -> bool:
    """Whether weights of this norm have yet to grow to their ordinary size."""
    return norm < NEAR_ZERO * ordinary_norm(parameters)


def last_before_it_moved(looks: Sequence[WeightSample]) -> list[WeightSample]:
    """Of each optimizer, the last look at weights that its own update had not thrown far away.

    Where there is none, the first as it was before that update: a look is taken after an update, and where that one was
    already far too large, what it shows is no measure of health.
    """
    found: dict[int, WeightSample] = {}
    settled: set[int] = set()
    for look in reversed([s for s in looks if s.weight_norm and is_number(s.weight_norm)]):
        optimizer = look.optimizer()
        if optimizer is None or id(optimizer) in settled:
            continue
        before = before_its_update(look)
        if before is None:
            settled.add(id(optimizer))
            found.setdefault(id(optimizer), look)
        else:
            found[id(optimizer)] = before
    return list(found.values())


def before_its_update(look: WeightSample) -> WeightSample | None:
    """Where the update was far too large: the look as if it had been taken before (at right angles, say). None elsewhere."""
    ratio, optimizer = look.update_ratio, look.optimizer()
    if not look.weight_norm or not is_number(ratio) or optimizer is None:
        return None
    norm = look.weight_norm / math.hypot(1.0, ratio)
    if ratio * norm < MOVED_FAR * max(norm, ordinary_norm(watchable(optimizer))):
        return None
    return dataclasses.replace(look, weight_norm=norm, update_ratio=None)


def usual_ratio(looks: Iterable[WeightSample]) -> float | None:
    """Median of the sampled update-to-weight ratios, without updates that were far too large; None where there is none."""
    ratios = [look.update_ratio for look in looks if is_number(look.update_ratio) and before_its_update(look) is None]
    return median(ratios) if ratios else None


def healthy_norm(look: WeightSample, optimizer: Optimizer, step: int) -> float:
    """The largest norm at `step` that health explains: updates of the size of those at the look, all in one direction.

    For weights that were near zero at the look, at least the ordinary size.
    """
    norm = look.weight_norm or 0.0
    ratio = min(look.update_ratio, WHOLE) if is_number(look.update_ratio) else 0.0
    added_up = norm * (1 + ratio * max(0, step - look.step))
    ordinary = ordinary_norm(watchable(optimizer))
    return max(added_up, ordinary) if norm < NEAR_ZERO * ordinary else added_up
