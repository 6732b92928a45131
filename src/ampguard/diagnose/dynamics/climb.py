"""How a loss climbs: from its best, steeply or gently, up to the step that failed; or with dips, from where it first was."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from ampguard.diagnose.dynamics.fits import kendall, smoothed
from ampguard.diagnose.dynamics.trajectory import Trajectory

RISEN = 10.0
RISEN_STEEPLY = 1e3
MIN_RISES = 3
MIN_RISES_GENTLY = 6
SHOWN = 8
LATE = 0.25
"""Share of the steps since it first climbed in which a loss that goes up and down has to be far above where it was."""


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


def rise_of(trajectory: Trajectory) -> Rise | None:
    """The climb of the loss that goes on to the present step, or None where there is no clear one."""
    losses = trajectory.loss_series()
    if len(losses) <= MIN_RISES or is_progress(losses):
        return None
    series = [(step, abs(loss)) for step, loss in losses]
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


def unsteady_rise_of(trajectory: Trajectory) -> Rise | None:
    """A climb with dips, some of them down to its beginning: where the loss was before it first climbed, against where it
    is of late. None where most of that is not far above all that was seen before.

    Noise does as much where the level of before is known from a few losses only: the weights have to tell as well.
    """
    losses = trajectory.loss_series()
    if len(losses) <= MIN_RISES_GENTLY or is_progress(losses):
        return None
    series = [(step, abs(loss)) for step, loss in losses]
    values = [value for _, value in series]
    first = _first_climb(values)
    if first is None:
        return None
    began = max(i for i, value in enumerate(values[:first]) if value <= 2 * min(values[:first]))
    before = values[: began + 1]
    level, climb = median(before[-MIN_RISES_GENTLY:]), series[began:]
    rises = len(climb) - 1
    late = sorted(values[-max(MIN_RISES_GENTLY, math.ceil(LATE * rises)) :])
    has_risen = rises >= MIN_RISES_GENTLY and median(late) >= RISEN * level and late[len(late) // 4] > 2 * max(before)
    return Rise(climb[0][0], level, values[-1], climb) if has_risen else None


def _first_climb(values: list[float]) -> int | None:
    """Where a loss was first far above its best so far: two steps in a row, for one batch alone may be bad."""
    best = values[0]
    for i in range(1, len(values) - 1):
        if min(values[i], values[i + 1]) >= RISEN * best:
            return i
        best = min(best, values[i])
    return None


def is_progress(losses: list[tuple[int, float]]) -> bool:
    """Whether the loss went below 0, and not out of all proportion: the likelihood of a density does as it learns."""
    usual = max(abs(loss) for _, loss in losses[: MIN_RISES + 1])
    has_stayed_low = max(loss for _, loss in losses) <= 2 * usual
    return losses[-1][1] < 0 and has_stayed_low and -losses[-1][1] < RISEN_STEEPLY * usual


def fall_from(losses: list[tuple[int, float]], began: int) -> Rise:
    """The loss from the step on at which it began."""
    points = [(step, abs(loss)) for step, loss in losses if step >= began] or [(began, abs(losses[-1][1]))]
    best = points[0][1]
    return Rise(began, best, points[-1][1], points)


def thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most eight of the points, the first and the last among them."""
    if len(points) <= SHOWN:
        return points
    return [points[round(i * (len(points) - 1) / (SHOWN - 1))] for i in range(SHOWN)]
