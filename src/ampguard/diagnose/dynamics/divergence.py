"""divergence: weights or activations grew step after step until they overflowed.

What happens   every update overshoots: the loss climbs, the gradients grow with it, the next update overshoots more.
               What is reported as an overflow is only where it ended; the step at which the growth began is named.
Why it hurts   no precision cures it: bfloat16 and float32 only take longer to overflow.
Instead        a smaller learning rate or a warm-up; torch.nn.utils.clip_grad_norm_ before the optimizer's step (after
               scaler.unscale_); look at what was changed or which batches came where the growth began.
Not this       values that outgrow float16 while the loss is healthy: see fp16-overflow. A single bad batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec
from torch.optim import Optimizer

from ampguard.capture.copies import wide_norm
from ampguard.capture.weights import WeightSample, watchable
from ampguard.diagnose.dynamics.doing import could_have_moved
from ampguard.diagnose.dynamics.finding import Situation, cause
from ampguard.diagnose.dynamics.fits import kendall, smoothed
from ampguard.diagnose.dynamics.proportion import (
    MOVED_FAR,
    healthy_norm,
    is_near_zero,
    last_before_it_moved,
    ordinary_norm,
)
from ampguard.diagnose.dynamics.remedies import Remedies, try_remedies, untried
from ampguard.diagnose.dynamics.trajectory import Trajectory, is_number
from ampguard.diagnose.words import number
from ampguard.incident import Fix, Incident

ENDS = frozenset(
    [
        "fp16-overflow",
        "overflow",
        "indeterminate",
        "nonfinite-parameter",
        "gradient-overflow",
        "singular-gradient",
        "unexplained",
    ]
)
"""How a divergence ends."""
SELDOM = frozenset(["domain-error"])
"""How it ends where weights leave a function's domain. Most of these are no end of one: a gentle rise is not enough."""

RISEN = 10.0
RISEN_STEEPLY = 1e3
MIN_RISES = 3
MIN_RISES_GENTLY = 6
WEIGHTS_GREW = 1.1
GREW_SUDDENLY = 10.0
"""By which factor the weights grow between two looks, in no healthy training."""
SHOWN = 8
MORE_RANGE = frozenset(["force-fp32", "use-bf16", "disable-amp"])


@dataclass(frozen=True, slots=True)
class Rise:
    """How the loss left its best: `began` is the last step at which it was still there."""

    began: int
    best: float
    last: float
    points: list[tuple[int, float]]

    @property
    def factor(self) -> float:
        return self.last / self.best if self.best > 0 else math.inf


@cause("divergence", asked=("failure",))
def divergence(situation: Situation) -> Incident | None:
    incident = situation.failure
    if incident is None or incident.cause not in ENDS | SELDOM:
        return None
    if incident.mode != "train":
        return in_evaluation(incident, situation)
    rise = rise_of(situation.trajectory)
    if rise is None:
        return sudden(incident, situation)
    if incident.cause in SELDOM and rise.factor < RISEN_STEEPLY:
        return None
    grown = growth_of_weights(situation, rise.began)
    if grown is not None and grown < WEIGHTS_GREW:
        return None  # the data got larger, not the model
    if grown is None and rise.factor < RISEN_STEEPLY:
        return None
    remedies = remedies_of(situation, even_if_data=True)
    if remedies is not None and remedies.fails_before and remedies.moved is not None and remedies.moved < MOVED_FAR:
        return None  # weights from before the rise fail as well, and these are hardly others
    return told(incident, situation, rise, grown, remedies)


def in_evaluation(incident: Incident, situation: Situation) -> Incident | None:
    """A divergence that shows first where the model is evaluated: only weights that have grown out of all proportion tell."""
    if any(fix.verified and fix.action in MORE_RANGE for fix in incident.fixes):
        return None
    rise = rise_of(situation.trajectory)
    grown = growth_of_weights(situation, rise.began) if rise is not None else None
    if rise is not None and grown is not None and grown >= GREW_SUDDENLY and rise.factor >= RISEN_STEEPLY:
        return told(incident, situation, rise, grown, None)
    return sudden(incident, situation)


def sudden(incident: Incident, situation: Situation) -> Incident | None:
    """A divergence of one or two updates: no climb can be seen, the weights tell.

    Either the failing batch is healthy on the weights of a few steps ago, and those have moved far; or, where these steps
    were not kept, the weights have grown many times over since they were last looked at (before the first look: beyond
    the size that weights of their shapes ordinarily have), and the optimizer's updates can have done it.
    """
    losses = situation.trajectory.loss_series()
    if not losses:
        return None
    remedies = remedies_of(situation, even_if_data=False) if incident.mode == "train" else None
    look = last_before_it_moved(situation.trajectory.looks)
    if remedies is not None and remedies.began_at is not None:
        if not is_giant(remedies, situation):
            return None
        had_grown = look is not None and has_outgrown(remedies.norm_before, look, remedies.noticed_at)
        began = remedies.noticed_at - 1 if had_grown else remedies.began_at
        return told(incident, situation, fall_from(losses, began), None, remedies)
    if incident.cause in SELDOM and incident.evidence.get("kind") != "nan":
        return None  # an operand on the domain's edge (a 0 under a logarithm) is no sign of large weights
    usual = max(abs(loss) for step, loss in losses if look is None or step <= max(look.step, losses[0][0]))
    if not is_out_of_range(incident, usual):
        return None  # a wider type bears these weights
    rise = max(abs(loss) for _, loss in losses) / usual if usual else 1.0
    growth = growth_by_optimizer(look, situation, rise)
    if growth is None:
        return None
    within = [step for step, loss in losses if abs(loss) <= 2 * usual]
    return told(incident, situation, fall_from(losses, within[-1]), growth, remedies, since_look=look is not None)


def is_out_of_range(incident: Incident, usual: float) -> bool:
    """Whether the failing step fails in float32 as well, or has a loss there that is out of all proportion."""
    if not any(fix.verified and fix.action in MORE_RANGE for fix in incident.fixes):
        return True
    wide = incident.evidence.get("loss_in_float32")
    return is_number(wide) and abs(wide) >= RISEN * usual > 0


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
        return now / look.weight_norm if by_it and has_outgrown(now, look, situation.step) else None
    for optimizer in situation.optimizers:
        now, ordinary = weight_norm_now(optimizer), ordinary_norm(watchable(optimizer))
        if not ordinary or not is_number(now) or now < GREW_SUDDENLY * ordinary:
            continue
        if could_have_moved(optimizer, now - ordinary, situation.step, situation.trajectory, rise):
            return now / ordinary
    return None


def has_outgrown(norm: float, look: WeightSample, step: int) -> bool:
    """Whether weights of this norm at `step` are out of all proportion to what was last seen of them."""
    optimizer = look.optimizer()
    return optimizer is not None and norm >= GREW_SUDDENLY * healthy_norm(look, optimizer, step)


def is_giant(remedies: Remedies, situation: Situation) -> bool:
    """Whether the updates of the stretch were out of all proportion, or the loss had left its range by far."""
    left = max((abs(loss) for _, loss in remedies.losses), default=0.0) >= RISEN * remedies.bound
    usual = usual_ratio(situation.trajectory)
    moved = remedies.moved
    weights = [p for optimizer in situation.optimizers for p in watchable(optimizer)]
    if moved is not None and is_near_zero(remedies.norm_before, weights):
        moved *= remedies.norm_before / ordinary_norm(weights)
    is_out_of_proportion = moved is not None and moved >= MOVED_FAR
    if usual is not None and moved is not None:
        is_out_of_proportion &= moved >= RISEN * usual * max(1, remedies.updates)
    return left or is_out_of_proportion


def usual_ratio(trajectory: Trajectory) -> float | None:
    """Median of the sampled update-to-weight ratios; None where there is none."""
    ratios = [look.update_ratio for look in trajectory.looks if is_number(look.update_ratio)]
    return median(ratios) if ratios else None


def fall_from(losses: list[tuple[int, float]], began: int) -> Rise:
    """The loss from the step on at which it began."""
    points = [(step, abs(loss)) for step, loss in losses if step >= began] or [(began, abs(losses[-1][1]))]
    best = points[0][1]
    return Rise(began, best, points[-1][1], points)


def remedies_of(situation: Situation, even_if_data: bool) -> Remedies | None:
    """What lower rates and clipping come to on the steps before the failure; None where they were not kept."""
    replay = situation.stretch
    return try_remedies(replay, situation.trajectory, even_if_data) if replay is not None else None


def rise_of(trajectory: Trajectory) -> Rise | None:
    """The climb of the loss that goes on to the present step, or None where there is no clear one."""
    series = [(step, abs(loss)) for step, loss in trajectory.loss_series()]
    if len(series) <= MIN_RISES:
        return None
    smooth = smoothed(series)
    lowest = min(value for _, value in smooth)
    until_lowest = sorted(smooth[: [value for _, value in smooth].index(lowest) + 1], key=lambda point: point[1])
    near = max(2 * lowest, until_lowest[len(until_lowest) // 4][1])
    start = max(i for i, (_, value) in enumerate(smooth) if value <= near)
    climb = series[start:]
    best, last = max(lowest, near / 2), climb[-1][1]
    values = [value for _, value in climb]
    rises = len(climb) - 1
    steeply = rises >= MIN_RISES and last >= RISEN_STEEPLY * best and values == sorted(values)
    gently = rises >= MIN_RISES_GENTLY and last >= RISEN * best and kendall(values) >= 2.3
    beyond_start = last > 2 * smooth[0][1]
    return Rise(climb[0][0], best, last, climb) if beyond_start and (steeply or gently) else None


def growth_of_weights(situation: Situation, began: int) -> float | None:
    """The norm of the weights now, against the first look at them; None where it is not known.

    Where they were near zero at the first look: against what they should have come to since the rise began.
    """
    first = situation.trajectory.first_look
    optimizer = first.optimizer() if first is not None else None
    if first is None or not first.weight_norm or optimizer is None:
        return None
    looks = [s for s in situation.trajectory.looks if s.optimizer() is optimizer and is_number(s.weight_norm)]
    now = weight_norm_now(optimizer)
    if not is_number(now):  # poisoned already: the last look before
        now = looks[-1].weight_norm if len(looks) > 1 else None
    if not is_number(now):
        return None
    if not is_near_zero(first.weight_norm, watchable(optimizer)):
        return now / first.weight_norm
    before = next((look for look in reversed(looks) if look.step <= began), first)
    return now / healthy_norm(before, optimizer, situation.step)


def weight_norm_now(optimizer: Optimizer | None) -> float | None:
    """The norm of what the optimizer updates; None without one."""
    weights = watchable(optimizer) if optimizer is not None else []
    return wide_norm(weights) if weights else None


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
    text = f"The training diverged from step {rise.began} on: {course_in_words(incident, rise)}"
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
        fixes=fixes(situation, remedies),
    )


def moved_in_words(remedies: Remedies, trajectory: Trajectory, facts: dict[str, Any]) -> str:
    """How far the weights moved since, and what that did; the numbers go into `facts`."""
    if remedies.moved is None:
        return ". On the weights of that step the failing one is finite"
    facts["weights_moved_by"] = remedies.moved
    usual = usual_ratio(trajectory)
    before = ""
    if usual:
        facts["usual_update_ratio"] = usual
        before = f" (one update usually moves them by {number(usual)} of it)"
    return (
        f". Since then the weights have moved by {number(remedies.moved)} times their norm{before}; on those of "
        f"that step the failing one is finite"
    )


def course_in_words(incident: Incident, rise: Rise) -> str:
    if len(rise.points) > 1:
        return f"the loss went from {number(rise.best)} to {number(rise.last)} in {incident.step - rise.began} steps"
    return f"the loss was {number(rise.last)} and left the numbers after {incident.step - rise.began} update(s)"


def fixes(situation: Situation, remedies: Remedies | None) -> tuple[Fix, ...]:
    """A lower learning rate and clipping, each as it was tried; what works first."""
    rate = next((g["lr"] for o in situation.optimizers for g in o.param_groups if "lr" in g), None)
    now = f" (it is {float(rate):g})" if rate is not None else ""
    if remedies is None:
        remedies = untried("the steps before the failure were not kept")
    lower, clip = remedies.lower_rate, remedies.clip
    if lower.change is not None and lower.change.max_rate is not None:
        how = f"keep the learning rate{now} at {lower.change.max_rate:g}, which it was before, or warm it up"
    elif lower.change is not None:
        how = f"lower the learning rate{now} by a factor of {1 / lower.change.rate_factor:g}, or warm it up"
    else:
        how = f"lower the learning rate{now} by a factor of 3 to 10, or warm it up"
    limit = clip.change.max_norm if clip.change is not None else None
    clipping = (
        "before the optimizer's step (after scaler.unscale_(optimizer) where there is a scaler): "
        f"torch.nn.utils.clip_grad_norm_(model.parameters(), {limit or 1.0:g})"
    )
    tried = [
        Fix("lower-learning-rate", None, how, lower.verified, lower.outcome),
        Fix("clip-gradients", None, clipping, clip.verified, clip.outcome),
    ]
    return tuple(sorted(tried, key=lambda fix: {True: 0, None: 1, False: 2}[fix.verified]))


def thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most eight of the points, the first and the last among them."""
    if len(points) <= SHOWN:
        return points
    return [points[round(i * (len(points) - 1) / (SHOWN - 1))] for i in range(SHOWN)]
