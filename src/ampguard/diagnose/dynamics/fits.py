"""Is a series of noisy numbers growing, and where to? Medians and ranks, so that a spike is not a trend."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MIN_POINTS = 9
KEEPS_PACE = 0.9


@dataclass(frozen=True, slots=True)
class Growth:
    """A series that grows. Values are medians over the last third of the window.

    `seen_at`: when it was of size `now`; `measured_until`: the end of the window.
    `rate`: growth a step at `measured_at`, with its relative `uncertainty`; `rate_before`: a third earlier.
    `now`: the present size; `gain`: by how much a third of the window raised it; `ratio`: this gain over the one
    before, at its lower confidence bound (1: linear; above: accelerating; below: levelling off); `span`: steps of a
    third; `factor`: growth over the window; `significance`: the rank correlation's z.
    """

    now: float
    gain: float
    ratio: float
    span: float
    factor: float
    tendency: float
    significance: float
    rate: float
    rate_before: float
    measured_at: float
    uncertainty: float
    seen_at: float
    measured_until: float

    def levels_off_below(self, limit: float) -> bool:
        """Whether the growth slows down so much that it would end before `limit`. `tendency` is the ratio, unbounded."""
        slowing = self.tendency
        return slowing < 1 and self.now + self.gain * slowing / (1 - slowing) < limit

    def slows_down(self, longer: Growth) -> bool:
        """Whether this newer window grows more slowly than a longer one let expect: a turning point, a wait is due."""
        change = (longer.rate - longer.rate_before) / longer.span
        expected = longer.rate + change * (self.measured_at - longer.measured_at)
        return self.rate * (1 + self.uncertainty) < KEEPS_PACE * expected

    def steps_to(self, limit: float, horizon: float) -> int | None:
        """Steps until `limit` is reached if each third goes on to gain `ratio` times the last; None if not by `horizon`.

        A sum of a geometric series: linear growth, exponential growth and growth that levels off are all of this form.
        `now` is the size at `seen_at`, some steps ago.
        """
        size, gain, thirds = self.now, self.gain, 0.0
        while size < limit:
            gain *= self.ratio
            thirds += 1
            size += gain
            if thirds * self.span > horizon or gain <= 0:
                return None
        if thirds:
            thirds -= self._left_of_third((size - limit) / gain)
        return max(0, round(thirds * self.span - (self.measured_until - self.seen_at)))

    def _left_of_third(self, beyond: float) -> float:
        """The share of a third that is still to come when all of its gain but this share is there."""
        if abs(self.ratio - 1) < 1e-3:
            return beyond
        return 1 - math.log1p((1 - beyond) * (self.ratio - 1)) / math.log(self.ratio)


def growth(steps: Sequence[int], sizes: Sequence[float]) -> Growth | None:
    """The growth of a series, or None where it is not sure: too few points, too much noise, or no growth."""
    count = len(sizes)
    if count < MIN_POINTS or steps[-1] <= steps[0]:
        return None
    significance = kendall(sizes)
    if significance < 3.0:
        return None
    third = count // 3
    cuts = (slice(0, third), slice(third, count - third), slice(count - third, count))
    first, middle, last = (median(sizes[c]) for c in cuts)
    centres = [median(steps[c]) for c in cuts]
    spans = (centres[1] - centres[0], centres[2] - centres[1])
    if min(spans) <= 0 or first <= 0:
        return None
    before, gain = (middle - first) / spans[0], (last - middle) / spans[1]
    noise = noise_of(steps, sizes) * 1.25 / math.sqrt(third)
    if gain * spans[1] <= 2 * noise or before <= 0:
        return None
    ratio = gain / before
    error = ratio * math.hypot(noise / (gain * spans[1]), noise / (before * spans[0]))
    span = (spans[0] + spans[1]) / 2
    return Growth(
        now=last,
        gain=gain * span,
        ratio=min(4.0, max(0.0, ratio - error)),
        span=span,
        factor=last / first,
        tendency=ratio,
        significance=significance,
        rate=gain,
        rate_before=before,
        measured_at=(centres[1] + centres[2]) / 2,
        uncertainty=noise / (gain * spans[1]),
        seen_at=centres[2],
        measured_until=steps[-1],
    )


def is_rising(steps: Sequence[int], sizes: Sequence[float]) -> bool:
    """Whether a few values seem to grow: reason enough to look more closely, not to speak."""
    if 2 <= len(sizes) < 4:
        return all(b > 2 * a for a, b in itertools.pairwise(sizes))
    some = list(sizes)[:: -max(1, len(sizes) // 12)]  # a dozen, the newest among them
    return len(steps) >= 4 and max(some[:3]) > 1.2 * min(some[-3:]) and kendall(some[::-1]) >= 1.6


def kendall(values: Sequence[float]) -> float:
    """z of the Mann-Kendall test: how sure it is that the values rise."""
    count = len(values)
    score = sum((b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :])
    spread = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return (score - math.copysign(1, score)) / spread if score and spread else 0.0


def noise_of(steps: Sequence[int], values: Sequence[float]) -> float:
    """The spread of the values around a smooth course: how far each lies from the line between its neighbours."""
    residuals = []
    for i in range(1, len(values) - 1):
        share = (steps[i] - steps[i - 1]) / max(1, steps[i + 1] - steps[i - 1])
        expected = (1 - share) * values[i - 1] + share * values[i + 1]
        residuals.append(abs(values[i] - expected) / math.sqrt(1 + share**2 + (1 - share) ** 2))
    return median(residuals) / 0.6745 if residuals else 0.0


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Each value replaced by the median of itself and its neighbours: a single bad batch disappears."""
    values = [value for _, value in points]
    return [(step, median(values[max(0, i - 1) : i + 2])) for i, (step, _) in enumerate(points)]
