"""Weights that updates as large as they are have thrown far off, where the loss does not climb as it does in a divergence.

A low precision ends such a run before the loss has left its range, or the first updates make of it a loss that is of no
use and stays there. A wider type bears the step then; it does not train the weights.
"""

from __future__ import annotations

from statistics import median

import msgspec

from ampguard.capture.sampling.weights import WeightSample
from ampguard.diagnose.dynamics.climb import RISEN, RISEN_STEEPLY, fall_from, is_progress
from ampguard.diagnose.dynamics.diverged import told
from ampguard.diagnose.dynamics.finding import Situation
from ampguard.diagnose.dynamics.growth import growth_by_own_updates
from ampguard.diagnose.dynamics.proportion import before_its_update
from ampguard.diagnose.dynamics.trajectory import is_number
from ampguard.diagnose.words import number
from ampguard.incident import Fix, Incident

OF_RANGE = frozenset(["fp16-overflow", "gradient-overflow"])
"""Failures that a wider type bears."""
LATE = 5
"""Losses at the end: where half of them are below the first, it has fallen."""
GREW_FAR = 16.0
"""Times the weights they were. Under a high rate they grow tenfold in trainings that go on well in float32: there it is the
low precision that has ended the run."""
WORSE = 2.0
"""Times the first loss: one beyond it is no better than that, whatever the batches do."""


def thrown_away(incident: Incident, situation: Situation) -> Incident | None:
    """The failure as the end of a divergence, where an update was seen that was as large as the weights, and either float32
    bears the step with a loss out of all proportion, or the weights have grown by such updates and the loss has not fallen.

    What else helped is told behind: it keeps the numbers finite.
    """
    losses = situation.trajectory.loss_series()
    far = _far_moves(situation)
    if incident.cause not in OF_RANGE or not losses or not far or is_progress(losses):
        return None
    began = far[0].step
    wide = incident.evidence.get("loss_in_float32")
    usual = max(abs(loss) for _, loss in losses)
    last = far[-1].step
    until_it = max((abs(loss) for step, loss in losses if step <= last), default=0.0)
    has_come_down = any(abs(loss) <= until_it for step, loss in losses if step > last)
    if not has_come_down and is_number(wide) and abs(wide) >= RISEN_STEEPLY * usual > 0:
        return told(incident, situation, fall_from(losses, began), None, None)
    growth = growth_by_own_updates(situation, began, 1.0)
    has_grown = growth is not None and growth[1] and growth[0] >= GREW_FAR
    late = median(abs(loss) for _, loss in losses[1:][-LATE:]) if len(losses) > 1 else 0.0
    if growth is None or not has_grown or not late >= abs(losses[0][1]) > 0:
        return None
    answer = told(incident, situation, fall_from(losses, min(began, losses[-1][0])), growth[0], None)
    return msgspec.structs.replace(answer, fixes=(*answer.fixes, *(_of_numbers_only(fix) for fix in incident.fixes)))


def _far_moves(situation: Situation) -> list[WeightSample]:
    """The looks, the first one first, at updates that were as large as the weights."""
    return [look for look in situation.trajectory.looks if before_its_update(look) is not None]


def _of_numbers_only(fix: Fix) -> Fix:
    effect = f"{fix.outcome}: the numbers fit, the updates stay as large" if fix.verified else fix.outcome
    return msgspec.structs.replace(fix, outcome=effect)


def with_smaller_updates(incident: Incident, situation: Situation) -> Incident | None:
    """An overflow behind losses that updates have raised many times over, or that have risen after an update as large as the
    weights: a smaller learning rate is among its fixes."""
    losses = situation.trajectory.loss_series()
    if incident.cause not in OF_RANGE or incident.mode != "train" or len(losses) < 2 or is_progress(losses):
        return None
    first, last, peak = abs(losses[0][1]), abs(losses[-1][1]), max(abs(loss) for _, loss in losses)
    far = _far_moves(situation)
    if not first or last < WORSE * first or not (far or peak >= RISEN * first):
        return None
    how = (
        f"a smaller learning rate, or a warm-up: the loss was {number(first)} before the first updates, and up to "
        f"{number(peak)} after them"
    )
    if far:
        how += f"; that of step {far[0].step} was {number(far[0].update_ratio or 0.0)} times as large as the weights"
    return msgspec.structs.replace(incident, fixes=(*incident.fixes, Fix("lower-learning-rate", None, how)))
