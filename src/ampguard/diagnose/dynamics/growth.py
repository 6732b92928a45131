"""By which factor have the weights grown, and is that more than health explains?"""

from __future__ import annotations

from itertools import pairwise

from torch.optim import Optimizer

from ampguard.capture.sampling.copies import wide_norm
from ampguard.capture.sampling.weights import WeightSample, watchable
from ampguard.diagnose.dynamics.doing import could_have_moved
from ampguard.diagnose.dynamics.finding import Situation
from ampguard.diagnose.dynamics.proportion import before_its_update, healthy_norm, is_near_zero, ordinary_norm
from ampguard.diagnose.dynamics.trajectory import is_number

GREW_SUDDENLY = 10.0
"""By which factor the weights grow between two looks, in no healthy training."""
GREW_AT_ONCE = 3.0
"""By which factor they grow in no single update, unless they were near zero."""
OUT_OF_ALL_PROPORTION = 1e6
"""By which factor they grow in no training that is to come to anything, however long it takes."""
MIN_GROWN = 3
"""Looks at which they had grown again by `GREW_AT_ONCE`, at least."""


def growth_by_optimizer(look: WeightSample | None, situation: Situation, rise: float) -> float | None:
    """By which factor the weights have outgrown what health explains, where the optimizer's updates can have done it.

    Against the last look at them; before the first look, against their ordinary size. None where they have not.
    `rise`: the largest loss since, against the largest one of before.
    """
    if look is not None:
        optimizer, now = look.optimizer(), weight_norm_now(look.optimizer())
        if optimizer is None or not look.weight_norm or not is_number(now):
            return None
        updates = situation.step - look.step + 1
        by_it = could_have_moved(optimizer, now - look.weight_norm, updates, situation.trajectory, rise)
        looks = [
            seen for seen in situation.trajectory.looks if seen.step == look.step and seen.optimizer() is optimizer
        ]
        at_once = any(before_its_update(seen) is not None for seen in looks) and now >= GREW_AT_ONCE * look.weight_norm
        return now / look.weight_norm if by_it and (at_once or has_outgrown(now, look, situation.step)) else None
    for optimizer in situation.optimizers:
        now, ordinary = weight_norm_now(optimizer), ordinary_norm(watchable(optimizer))
        if not ordinary or not is_number(now) or now < GREW_SUDDENLY * ordinary:
            continue
        if could_have_moved(optimizer, now - ordinary, situation.step, situation.trajectory, rise):
            return now / ordinary
    return None


def growth_of_far_moves(situation: Situation) -> float | None:
    """By which factor weights have grown of which an update was seen that was as large as they are; None without one."""
    factors = [0.0]
    for first in situation.trajectory.first_looks.values():
        optimizer, now = first.optimizer(), weight_norm_now(first.optimizer())
        looks = [look for look in situation.trajectory.looks if look.optimizer() is optimizer]
        if is_number(now) and first.weight_norm and any(before_its_update(look) is not None for look in looks):
            factors.append(now / first.weight_norm)
    return max(factors) or None


def growth_behind_a_calm_loss(situation: Situation) -> tuple[float, int] | None:
    """By which factor weights have grown look after look, whatever the loss did, and the last look before; None elsewhere.

    A loss behind a normalisation does not see the size of weights. One jump is no growth: somebody has set them so.
    """
    found = []
    for first in situation.trajectory.first_looks.values():
        optimizer, now = first.optimizer(), weight_norm_now(first.optimizer())
        if optimizer is None or not is_number(now) or not first.weight_norm:
            continue
        start = max(first.weight_norm, ordinary_norm(watchable(optimizer)))
        looks = [(look.step, look.weight_norm) for look in situation.trajectory.looks if look.optimizer() is optimizer]
        seen = [(step, norm) for step, norm in looks if is_number(norm)]
        norms = [first.weight_norm, *(norm for _, norm in seen), now]
        grew = sum(after >= GREW_AT_ONCE * before > 0 for before, after in pairwise(norms))
        if now >= OUT_OF_ALL_PROPORTION * start and grew >= MIN_GROWN:
            began = max((step for step, norm in seen if norm <= 2 * start), default=first.step)
            found.append((now / start, began))
    return max(found, default=None)


def growth_by_own_updates(situation: Situation, began: int, rise: float) -> tuple[float, bool] | None:
    """By which factor the weights of an optimizer have grown since the first look, where its updates can have done it; and
    whether one of them was seen that was as large as the weights. `rise`: of the loss meanwhile."""
    found = []
    for first in situation.trajectory.first_looks.values():
        optimizer, now = first.optimizer(), weight_norm_now(first.optimizer())
        factor = growth_since_first(first, situation, began)
        if optimizer is None or not is_number(now) or factor is None:
            continue
        updates = situation.step - first.step + 1
        if could_have_moved(optimizer, now - (first.weight_norm or 0.0), updates, situation.trajectory, rise):
            looks = [look for look in situation.trajectory.looks if look.optimizer() is optimizer]
            found.append((factor, any(before_its_update(look) is not None for look in looks)))
    return max(found, default=None)


def has_outgrown(norm: float, look: WeightSample, step: int) -> bool:
    """Whether weights of this norm at `step` are out of all proportion to what was last seen of them."""
    optimizer = look.optimizer()
    return optimizer is not None and norm >= GREW_SUDDENLY * healthy_norm(look, optimizer, step)


def growth_of_weights(situation: Situation, began: int) -> float | None:
    """The largest factor by which an optimizer's weights have grown since the first look at them; None where it is not known."""
    factors = [growth_since_first(first, situation, began) for first in situation.trajectory.first_looks.values()]
    return max((factor for factor in factors if factor is not None), default=None)


def growth_since_first(first: WeightSample, situation: Situation, began: int) -> float | None:
    """The norm of the weights now, against the first look at them.

    Where they were near zero at the first look: against what they should have come to since the rise began.
    """
    optimizer = first.optimizer()
    if not first.weight_norm or optimizer is None:
        return None
    first = before_its_update(first) or first
    looks = [s for s in situation.trajectory.looks if s.optimizer() is optimizer and is_number(s.weight_norm)]
    now = weight_norm_now(optimizer)
    if not is_number(now):  # poisoned already: the last look before
        now = looks[-1].weight_norm if len(looks) > 1 else None
    if not is_number(now):
        return None
    norm = first.weight_norm or 0.0
    if not is_near_zero(norm, watchable(optimizer)):
        return now / norm
    before = next((look for look in reversed(looks) if look.step <= began), first)
    return now / healthy_norm(before, optimizer, situation.step)


def weight_norm_now(optimizer: Optimizer | None) -> float | None:
    """The norm of what the optimizer updates; None without one."""
    weights = watchable(optimizer) if optimizer is not None else []
    return wide_norm(weights) if weights else None
