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

import msgspec

from ampguard.capture.weights import norm_of, watchable
from ampguard.diagnose.dynamics.finding import Situation, cause
from ampguard.diagnose.dynamics.fits import kendall, smoothed
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

RISEN = 10.0
RISEN_STEEPLY = 1e3
MIN_RISES = 3
MIN_RISES_GENTLY = 6
WEIGHTS_GREW = 1.1
SHOWN = 8


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
    if incident is None or incident.cause not in ENDS or incident.mode != "train":
        return None
    rise = rise_of(situation.trajectory)
    if rise is None:
        return None
    grown = growth_of_weights(situation)
    if grown is not None and grown < WEIGHTS_GREW:
        return None  # the data got larger, not the model
    if grown is None and rise.factor < RISEN_STEEPLY:
        return None
    return told(incident, situation, rise, grown)


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


def growth_of_weights(situation: Situation) -> float | None:
    """The norm of the weights now, against the first look at them; None where it is not known."""
    first = situation.trajectory.first_look
    if first is None or not first.weight_norm:
        return None
    optimizer = first.optimizer()
    norm = norm_of(list(watchable(optimizer))) if optimizer is not None else None
    now = float(norm.item()) if norm is not None else None
    if not is_number(now):  # poisoned already: the last look before
        looks = [s for s in situation.trajectory.looks if s.optimizer() is optimizer and is_number(s.weight_norm)]
        now = looks[-1].weight_norm if len(looks) > 1 else None
    return now / first.weight_norm if is_number(now) else None


def told(incident: Incident, situation: Situation, rise: Rise, grown: float | None) -> Incident:
    trajectory = situation.trajectory
    steps = incident.step - rise.began
    text = (
        f"The training diverged from step {rise.began} on: the loss went from {number(rise.best)} to "
        f"{number(rise.last)} in {steps} steps"
    )
    facts = {
        "began_at_step": rise.began,
        "best_loss": rise.best,
        "last_finite_loss": rise.last,
        "losses": [[step, value] for step, value in thin(rise.points)],
        "ended_as": incident.cause,
    }
    if grown is not None:
        facts["weights_grew_by"] = grown
        text += f", the norm of the weights grew by a factor of {number(grown)}"
    norms = [point for point in trajectory.recent_norms() if point[0] >= rise.began]
    if len(norms) > 1 and norms[-1][1] > norms[0][1]:
        facts["gradient_norms"] = [[step, value] for step, value in thin(norms)]
        text += f", that of the gradients from {number(norms[0][1])} to {number(norms[-1][1])}"
    text += f". It ended in step {incident.step}: {incident.explanation}"
    return msgspec.structs.replace(
        incident,
        cause="divergence",
        explanation=text,
        evidence={**incident.evidence, **facts},
        fixes=fixes(situation),
    )


def fixes(situation: Situation) -> tuple[Fix, ...]:
    rate = next((g["lr"] for o in situation.optimizers for g in o.param_groups if "lr" in g), None)
    now = f" (it is {float(rate):g})" if rate is not None else ""
    return (
        Fix("lower-learning-rate", None, f"lower the learning rate{now} by a factor of 3 to 10, or warm it up"),
        Fix(
            "clip-gradients",
            None,
            "before the optimizer's step (after scaler.unscale_(optimizer) where there is a scaler): "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        ),
    )


def thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most eight of the points, the first and the last among them."""
    if len(points) <= SHOWN:
        return points
    return [points[round(i * (len(points) - 1) / (SHOWN - 1))] for i in range(SHOWN)]
