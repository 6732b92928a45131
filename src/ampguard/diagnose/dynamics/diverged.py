"""A failure told as the end of a divergence: the course that led to it in words, and the fixes as they were tried."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from ampguard.capture.protocol.script_lines import module_around
from ampguard.capture.sampling.rates import rate_of_group
from ampguard.diagnose.dynamics.climb import Rise, thin
from ampguard.diagnose.dynamics.finding import Situation
from ampguard.diagnose.dynamics.proportion import usual_ratio
from ampguard.diagnose.dynamics.remedies import Remedies, untried
from ampguard.diagnose.dynamics.trajectory import Trajectory
from ampguard.diagnose.protocol.owners import variable_name
from ampguard.diagnose.words import number
from ampguard.incident import Fix, Incident

STILL_RISING = 1.2
"""By which factor a rate that is being warmed up has risen since a loss began to climb, at least."""

_LIGHTNING = (
    "let Lightning clip: Trainer(gradient_clip_val={limit}); in manual optimization: def on_before_optimizer_step(self, "
    "optimizer): self.clip_gradients(optimizer, gradient_clip_val={limit}, gradient_clip_algorithm='norm')"
)
LOOPS_THAT_CLIP = {
    "lightning.pytorch.loops": _LIGHTNING,
    "pytorch_lightning.loops": _LIGHTNING,
    "transformers.trainer": "let the Trainer clip: TrainingArguments(max_grad_norm={limit})",
}
"""By the modules that a framework's loop is in: between its backward pass and its step stands no line of the script's."""


def told(
    incident: Incident,
    situation: Situation,
    rise: Rise,
    grown: float | None,
    remedies: Remedies | None,
    since_look: bool = True,
) -> Incident:
    """The failure as the end of a divergence. `grown`: of the weights; against their ordinary size without a look."""
    trajectory = situation.trajectory
    facts: dict[str, Any] = {
        "began_at_step": rise.began,
        "best_loss": rise.best,
        "last_finite_loss": rise.last,
        "losses": [[step, value] for step, value in thin(rise.points)],
        "ended_as": incident.cause,
    }
    whose = name_of(situation)
    if whose is not None:
        facts["optimizer"] = whose
    text = f"The training diverged from step {rise.began} on: {course_in_words(incident, rise, whose)}"
    if grown is not None and not since_look:
        facts["weights_beyond_ordinary"] = grown
        text += f", the weights are {number(grown)} times as large as weights of their shapes ordinarily begin"
    elif grown is not None:
        facts["weights_grew_by"] = grown
        text += f", the norm of the weights grew by a factor of {number(grown)}"
    norms = [point for point in trajectory.recent_norms() if point[0] >= rise.began]
    if len(norms) > 1 and norms[-1][1] > norms[0][1]:
        facts["gradient_norms"] = [[step, value] for step, value in thin(norms)]
        text += f", that of the gradients from {number(norms[0][1])} to {number(norms[-1][1])}"
    if remedies is not None and remedies.is_weights_doing:
        facts["alarm"] = remedies.reason
        text += f". It was noticed in step {remedies.noticed_at}: {remedies.reason}{moved_in_words(remedies, trajectory, facts)}"
    text += f". It ended in step {incident.step}: {incident.explanation}"
    return msgspec.structs.replace(
        incident,
        cause="divergence",
        explanation=text,
        evidence={**incident.evidence, **facts},
        fixes=fixes(situation, remedies, rise.began),
    )


def moved_in_words(remedies: Remedies, trajectory: Trajectory, facts: dict[str, Any]) -> str:
    """How far the weights moved since, and what that did; the numbers go into `facts`."""
    if remedies.moved is None:
        return ". On the weights of that step the failing one is finite"
    facts["weights_moved_by"] = remedies.moved
    usual = usual_ratio(trajectory.looks)
    before = ""
    if usual:
        facts["usual_update_ratio"] = usual
        before = f" (one update usually moves them by {number(usual)} of it)"
    return (
        f". Since then the weights have moved by {number(remedies.moved)} times their norm{before}; on those of "
        f"that step the failing one is finite"
    )


def name_of(situation: Situation) -> str | None:
    """What the script calls the optimizer whose losses are told, where there are several."""
    return variable_name(situation.whose) if situation.whose is not None else None


def course_in_words(incident: Incident, rise: Rise, whose: str | None = None) -> str:
    loss = f"the loss of `{whose}`" if whose else "the loss"
    if len(rise.points) > 1:
        steps = incident.step - rise.began
        how_long = f"in {steps} steps" if steps else "within one iteration"
        return f"{loss} went from {number(rise.best)} to {number(rise.last)} {how_long}"
    if incident.step == rise.began:
        return f"{loss} was {number(rise.last)} and left the numbers after an update of the same iteration"
    return f"{loss} was {number(rise.last)} and left the numbers after {incident.step - rise.began} update(s)"


def borne_rate(trajectory: Trajectory, began: int, now: float) -> tuple[int, float] | None:
    """Of a learning rate that has risen all the time: what it was when last seen before the loss began to climb, and when."""
    looks = [(look.step, look.rate) for look in trajectory.looks if look.rate > 0]
    before = [point for point in looks if point[0] <= began]
    rates = [rate for _, rate in looks]
    is_rising = rates == sorted(rates) and bool(before) and now >= STILL_RISING * before[-1][1] > 0
    return before[-1] if is_rising and before[-1][1] >= STILL_RISING * rates[0] else None


def _clip_by_loop(limit: float) -> str | None:
    """How the framework clips whose loop is running; None in a loop of the script's own."""
    loop = module_around(sys._getframe(), LOOPS_THAT_CLIP)
    return LOOPS_THAT_CLIP[loop].format(limit=f"{limit:g}") if loop is not None else None


def fixes(situation: Situation, remedies: Remedies | None, began: int) -> tuple[Fix, ...]:
    """A lower learning rate and clipping, each as it was tried; what works first."""
    optimizers = situation.optimizers if situation.whose is None else [situation.whose]
    rate = next((rate_of_group(g) for o in optimizers for g in o.param_groups if "lr" in g), None)
    name = name_of(situation)
    of, parameters = f" of `{name}`" if name else "", "model.parameters()"
    if situation.whose is not None:
        parameters = f"[p for group in {name or 'its optimizer'}.param_groups for p in group['params']]"
    now = f" (it is {rate:g})" if rate is not None else ""
    instead = "or warm it up"
    borne = borne_rate(situation.trajectory, began, rate) if rate is not None else None
    if borne is not None and rate is not None:
        now = f" (it is {rate:g} and still rising: in step {borne[0]} it was {borne[1]:g})"
        instead = f"or end its warm-up at {borne[1]:g}, which these weights bore"
    if remedies is None:
        remedies = untried("the steps before the failure were not kept")
    lower, clip = remedies.lower_rate, remedies.clip
    if lower.change is not None and lower.change.max_rate is not None:
        highest = lower.change.max_rate
        bounded = f"at {highest:g}, which it was before" if highest == remedies.rate_before else f"below {highest:g}"
        how = f"keep the learning rate{of}{now} {bounded}, {instead}"
    elif lower.change is not None:
        how = f"lower the learning rate{of}{now} by a factor of {1 / lower.change.rate_factor:g}, {instead}"
    else:
        how = f"lower the learning rate{of}{now} by a factor of 3 to 10, {instead}"
    if lower.verified and lower.change is not None and lower.change.of_all:
        how += ", and those of the other optimizers alike"
    limit = clip.change.max_norm if clip.change is not None else None
    clipping = _clip_by_loop(limit or 1.0) or (
        "before the optimizer's step (after scaler.unscale_(optimizer) where there is a scaler): "
        f"torch.nn.utils.clip_grad_norm_({parameters}, {limit or 1.0:g})"
    )
    if clip.verified and clip.change is not None and clip.change.of_all:
        clipping += ", and those of the other optimizers alike"
    tried = [
        Fix("lower-learning-rate", None, how, lower.verified, lower.outcome),
        Fix("clip-gradients", None, clipping, clip.verified, clip.outcome),
    ]
    return tuple(sorted(tried, key=lambda fix: {True: 0, None: 1, False: 2}[fix.verified]))
