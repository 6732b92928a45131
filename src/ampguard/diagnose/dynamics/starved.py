"""Gradients that are flushed to zero because something else has made the loss scale fall: a consequence, no failure of its own.

A loss that does not fit in every third batch is skipped each time, and halves the scale each time. In the batches between
nothing is left of the gradients in the end. What is to be repaired is that loss; the scale would not have fallen without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ampguard.diagnose.cases.case import Case
from ampguard.diagnose.dynamics.trajectory import Trajectory
from ampguard.incident import Incident

FALLEN = 2.0**8
"""Of the scale: a smaller fall is the scaler's ordinary search."""


def fall_behind(underflow: Incident, cases: Iterable[Case], trajectory: Trajectory) -> Case | None:
    """The error that was told, and that has made the loss scale fall to where gradients are flushed to zero."""
    scales = [scale for _, scale, _ in trajectory.used_scales()]
    now = underflow.evidence.get("loss_scale") or (scales[-1] if scales else None)
    if now is None or not now > 0 or max(scales, default=0.0) < FALLEN * now:
        return None
    halvings = math.log2(max(scales) / now)
    found = [case for case in cases if _makes_it_fall(case, underflow) and case.occurrences >= halvings / 2]
    return max(found, key=lambda case: case.occurrences, default=None)


def _makes_it_fall(case: Case, underflow: Incident) -> bool:
    told = case.incident
    is_error = told.severity == "error" and told.mode == "train" and told.phase != "protocol"
    return is_error and case.part_of is None and told.step <= underflow.step
