"""A learning-rate range test: it raises the rate by the same factor in each step until the loss is of no use.

Smith, "Cyclical learning rates for training neural networks" (2017); `lr_find` of fastai and Lightning. That it ends in numbers
that are not finite is what it is for: the script restores the weights and chooses a rate. A warm-up ends long before.
"""

from __future__ import annotations

import math

import msgspec

from ampguard.capture.sampling.rates import rate_of_optimizer
from ampguard.diagnose.dynamics.finding import Situation
from ampguard.diagnose.words import number
from ampguard.incident import Incident

GROWN = 1e3
"""Times what it began with: the rate has grown at least so much."""
LOOKS = 4
"""Steps at which the rate was seen, at the fewest."""
SAME = 0.02
"""How far the logarithm of the rate may be from a straight line, as a share of all that it has risen."""


def as_a_test(incident: Incident, situation: Situation) -> Incident:
    """The failure, as a note where it has ended a range test."""
    rates = _rates(situation, incident.step)
    if incident.mode != "train" or incident.severity != "error" or rates is None:
        return incident
    first, last = rates
    text = (
        f"{incident.explanation} The learning rate was raised by the same factor in each step, from {number(first)} to "
        f"{number(last)}, as a learning-rate range test does: it ends like this on purpose, where the weights are restored."
    )
    return msgspec.structs.replace(
        incident, severity="info", explanation=text, evidence={**incident.evidence, "range_test": [first, last]}
    )


def _rates(situation: Situation, step: int) -> tuple[float, float] | None:
    """The rate that a test has begun with, and the one that it has come to; None where it did not grow like that."""
    for optimizer in situation.optimizers:
        seen = {
            look.step: look.rate
            for look in situation.trajectory.looks
            if look.optimizer() is optimizer and look.rate > 0
        }
        now = rate_of_optimizer(optimizer)
        if now > 0 and step not in seen:
            seen[step] = now
        points = sorted(seen.items())
        if len(points) < LOOKS or points[-1][1] < GROWN * points[0][1]:
            continue
        logs = [(at, math.log(rate)) for at, rate in points]
        (begin, low), (end, high) = logs[0], logs[-1]
        slope = (high - low) / (end - begin)
        if all(abs(log - low - slope * (at - begin)) <= SAME * (high - low) for at, log in logs):
            return points[0][1], points[-1][1]
    return None
