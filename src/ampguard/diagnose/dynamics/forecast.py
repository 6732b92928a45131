"""fp16-overflow, said before it happens: activations that will leave float16's range, and in about how many steps.

Asked after each sampled step. It speaks when a layer's maxima have come within reach of the limit, grow beyond doubt,
and would pass it within a time not longer than that over which they were watched, even if the growth slows down as
far as the noise allows. While the learning rate rises it keeps silent: that growth ends with the warm-up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ampguard.diagnose.dynamics.finding import Situation, cause
from ampguard.diagnose.dynamics.fits import MIN_POINTS, Growth, growth, kendall, noise_of
from ampguard.diagnose.dynamics.trajectory import Peak
from ampguard.diagnose.words import number
from ampguard.incident import Fix, Incident
from ampguard.numerics import dtype_name, largest
from ampguard.replay.activations import Place

NEAR = 0.45
"""Share of the limit from which on a forecast is made."""

NEAR_IN_NOISE = 0.5
SHORT_WINDOW = 19
MIN_FACTOR = 1.3
WINDOWS = (9, 13, 19, 28, 40, 60, 96)
"""Numbers of samples over which the growth is measured."""

WATCHED_FOR = 1.0
"""A forecast reaches at most this many times as far ahead as the growth was watched."""

SPREADS = 2.0
"""A noisy series leaves the range with its largest values: when its median is this many spreads below the limit."""

SHOWN = 8


@dataclass(frozen=True, slots=True)
class Outlook:
    """A place that will leave the range."""

    place: Place
    size: float
    limit: float
    steps_left: int
    growth: Growth
    since: int
    samples: int


@cause("fp16-overflow", asked=("peaks",))
def forecast(situation: Situation) -> Incident | None:
    found = sorted(outlooks(situation), key=lambda outlook: outlook.steps_left)
    return told(found, situation) if found else None


def outlooks(situation: Situation) -> Iterator[Outlook]:
    """Every place that is on its way out."""
    for place, peak in situation.trajectory.peaks.items():
        limit = largest(place.dtype)
        if not peak.sizes or peak.sizes[-1] < NEAR * limit:
            continue
        found = outlook_of(place, peak, limit)
        if found is not None:
            yield found


def outlook_of(place: Place, peak: Peak, limit: float) -> Outlook | None:
    """The outlook of one place: it rises as a whole, two windows that end now say when, none that it levels off."""
    steps, sizes = steady(peak)
    if len(sizes) < MIN_POINTS or kendall(sizes) < 3.0:
        return None
    agreeing = []
    newest: Growth | None = None
    for points in sorted({min(n, len(sizes)) for n in WINDOWS}):
        window = growth(steps[-points:], sizes[-points:])
        if window is None:
            continue
        newest = newest or window
        room = limit / (1 + SPREADS * noise_of(steps[-points:], sizes[-points:]) / window.now)
        if window.levels_off_below(room) or newest.slows_down(window):
            return None
        left = window.steps_to(room, WATCHED_FOR * (steps[-1] - steps[-points]))
        if left is not None and window.factor >= MIN_FACTOR:
            agreeing.append((left, window, steps[-points], points))
    if newest is None or len(agreeing) < min(2, len(sizes) - MIN_POINTS + 1):
        return None
    if agreeing[0][3] > SHORT_WINDOW and newest.now < NEAR_IN_NOISE * limit:
        return None  # too noisy to see in a short window whether the growth goes on
    left, window, since, points = agreeing[0]
    return Outlook(place, sizes[-1], limit, left, window, since, points)


def steady(peak: Peak) -> tuple[list[int], list[float]]:
    """The samples since the learning rate last rose."""
    rates = list(peak.rates)
    start = max((i for i in range(1, len(rates)) if rates[i] > rates[i - 1] * 1.0001), default=0)
    return list(peak.steps)[start:], list(peak.sizes)[start:]


def told(found: list[Outlook], situation: Situation) -> Incident:
    first = found[0]
    place, dtype = first.place, dtype_name(first.place.dtype)
    where = f" in {place.module}" if place.module else " in the root module" if place.module is not None else ""
    op = place.op.split(".")[1].lstrip("_") if "." in place.op else place.op
    more = len(found) - 1
    others = f" {more} other result{'s are' if more > 1 else ' is'} on the same way." if more else ""
    return Incident(
        step=situation.step,
        rank=situation.rank,
        mode="train",
        phase="forward" if place.module is not None else "loss",
        severity="warning",
        cause="fp16-overflow",
        module=place.module,
        op=place.op,
        dtype=dtype,
        location=place.line.location() if place.line is not None else None,
        explanation=(
            f"The result of {op}{where} will not fit {dtype} much longer: its largest |value| grew by a factor of "
            f"{number(round(first.growth.factor, 2))} in the last {situation.step - first.since} steps to "
            f"{number(first.size)}, and {dtype} ends at {first.limit:g}. Going on like this it overflows in about "
            f"{first.steps_left} steps.{others}"
        ),
        evidence={
            "forecast": True,
            "steps_left": first.steps_left,
            "max_abs": first.size,
            "limit": first.limit,
            "growth_factor": first.growth.factor,
            "since_step": first.since,
            "samples": first.samples,
            "layers": [
                {"module": o.place.module, "op": o.place.op, "max_abs": o.size, "steps_left": o.steps_left}
                for o in found[:SHOWN]
            ],
        },
        fixes=(
            Fix("force-fp32", place.module, f"leave autocast{where} before it overflows"),
            Fix("use-bf16", None, "train in bfloat16, which has float32's range"),
            Fix(
                "lower-learning-rate",
                None,
                "lower the learning rate, or clip the gradients, if this growth is not meant",
            ),
        ),
    )
