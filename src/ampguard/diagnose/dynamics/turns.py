"""Several optimizers in one iteration: whose losses and weights are to be told where a training diverges?

A critic, an actor and a temperature have losses of their own, and the sum of them is nobody's. What the weights tell comes
first: a loss that is computed through another network (an actor's, through the critic) goes up with that one's.
"""

from __future__ import annotations

from torch.optim import Optimizer

from ampguard.diagnose.dynamics.finding import Situation
from ampguard.diagnose.dynamics.growth import growth_since_first

WEIGHTS_GREW = 2.0


def diverging(situation: Situation, updates: int) -> Optimizer | None:
    """The optimizer whose weights have grown most, else that whose loss has failed; None where there is only one.

    `updates`: those that were made in the failing iteration.
    """
    trajectory = situation.trajectory
    known = {key: optimizer for key, own in trajectory.turns.items() if (optimizer := own.optimizer()) is not None}
    if len(known) < 2:
        return None
    firsts = [
        first for first in trajectory.first_looks.values() if (o := first.optimizer()) is not None and id(o) in known
    ]
    grown = [(growth, id(first.optimizer())) for first in firsts if (growth := growth_since_first(first, situation, 0))]
    growth, key = max(grown, default=(0.0, 0))
    if growth >= WEIGHTS_GREW:
        return known[key]
    return known.get(trajectory.order[updates]) if updates < len(trajectory.order) else None
