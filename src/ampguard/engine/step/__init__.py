"""From scaled gradients to updated parameters: one read of the gradients, one pass of the optimizer, no waiting."""

from ampguard.engine.step.check import GradientCheck
from ampguard.engine.step.gradients import check_gradients, unscale_gradients
from ampguard.engine.step.rounded_update import RoundedUpdate
from ampguard.engine.step.rounding import compensated_round_, stochastic_round_
from ampguard.engine.step.scale import LossScale
from ampguard.engine.step.update import apply_update, check_for_update

__all__ = [
    "GradientCheck",
    "LossScale",
    "RoundedUpdate",
    "apply_update",
    "check_for_update",
    "check_gradients",
    "compensated_round_",
    "stochastic_round_",
    "unscale_gradients",
]
