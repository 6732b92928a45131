"""Failures that follow from a broken protocol: an optimizer has stepped with gradients that were far too large.

They are no incidents of their own, if its updates have thrown the weights away. An optimizer that divides by the size of
its gradients (Adam) bears them: what its weights moved by is then no more than its rate allows, and nothing follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ampguard.capture.sampling.rates import rate_of_optimizer
from ampguard.capture.sampling.weights import watchable
from ampguard.diagnose.cases.case import Case
from ampguard.diagnose.dynamics.finding import Situation
from ampguard.diagnose.dynamics.growth import GREW_AT_ONCE, weight_norm_now
from ampguard.diagnose.dynamics.proportion import last_before_it_moved, ordinary_norm
from ampguard.diagnose.dynamics.trajectory import is_number

TOO_LARGE = 8.0
"""By which factor gradients are too large, at least, for anything to follow from it."""

BY_ITS_RATE = 3.0
"""Times the learning rate: what an optimizer that divides by the size of its gradients moves a weight by at most."""

CLIPPED = 2.0
"""Times a limit: a norm from which on clipping would have made a difference."""

OF_WEIGHTS = frozenset(
    {"fp16-overflow", "overflow", "indeterminate", "gradient-overflow", "loss-scale-overflow", "nonfinite-parameter"}
    | {"scale-collapse"}
)
"""How weights that were thrown away show."""


def breach_behind(cause: str, cases: Iterable[Case], situation: Situation) -> Case | None:
    """The case of a broken protocol whose updates this failure follows from."""
    if cause not in OF_WEIGHTS and cause != "divergence":
        return None
    grown = 1.0 if cause == "divergence" else GREW_AT_ONCE
    told = [case for case in cases if is_too_large(case, situation.step)]
    return next((c for c in told if has_thrown(c, situation, grown) or was_not_clipped(c, situation)), None)


def piled_up_behind(began: int, cases: Iterable[Case], situation: Situation) -> Case | None:
    """The case of gradients that are never cleared, where a divergence that began at `began` follows from it.

    What piles up grows with each step by itself, so no factor tells how far it was too large when it was noticed. Of
    weights that the script moves itself no norms are known: they are those that the divergence is about.
    """
    for case in cases:
        known = case.incident
        if known.cause != "missing-zero-grad" or known.severity != "error" or known.evidence.get("is_stuck"):
            continue
        since = known.step - int(known.evidence["steps"])
        if since <= began and (known.evidence.get("by_hand") or has_thrown(case, situation, 1.0)):
            return case
    return None


def poisoned_behind(cause: str, cases: Iterable[Case], situation: Situation) -> Case | None:
    """The case of kept gradients that are not finite any more, where the scale falls because of them."""
    since = situation.trajectory.falling_since
    if cause != "scale-collapse" or since is None:
        return None
    told = (case for case in cases if case.is_breach and case.incident.evidence.get("not_finite"))
    return next((case for case in told if case.incident.step >= since), None)


def is_too_large(case: Case, step: int) -> bool:
    """Whether it tells of updates, up to `step`, with gradients that were far too large."""
    known, factor = case.incident, case.incident.evidence.get("factor")
    if not case.is_breach or known.severity != "error" or case.optimizer is None or known.step > step:
        return False
    return is_number(factor) and factor >= TOO_LARGE


def was_not_clipped(case: Case, situation: Situation) -> bool:
    """Whether gradients were let through that the limit would have clipped, had it not been computed of scaled ones."""
    limit, scale = case.incident.evidence.get("limit"), case.incident.evidence.get("scale")
    if not (is_number(limit) and is_number(scale)):
        return False
    return any(is_number(v.grad_norm) and v.grad_norm > CLIPPED * limit / scale for v in situation.trajectory.recent)


def has_thrown(case: Case, situation: Situation, grown: float) -> bool:
    """Whether its optimizer's weights have grown since, by more than `grown` and by more than its rate explains."""
    optimizer = case.optimizer() if case.optimizer is not None else None
    if optimizer is None:
        return False
    now, weights = weight_norm_now(optimizer), watchable(optimizer)
    if now is None or not math.isfinite(now):
        return now is not None
    looks = [look for look in situation.trajectory.looks if look.optimizer() is optimizer]
    before = [look for look in looks if look.step < case.incident.step and look.weight_norm] or last_before_it_moved(
        looks
    )
    norm = (before[-1].weight_norm if before else None) or ordinary_norm(weights)
    since = before[-1].step if before else case.incident.step
    rate = rate_of_optimizer(optimizer)
    reach = BY_ITS_RATE * rate * math.sqrt(sum(p.numel() for p in weights)) * (situation.step - since + 1)
    return now >= grown * norm and now - norm > reach
