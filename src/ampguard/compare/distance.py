"""How far a loss curve is from another one."""

from __future__ import annotations

import itertools
import statistics

from ampguard.compare.course import Course

TAIL = 4
"""The last quarter of the steps is what curves are compared on."""


def distance(course: Course, reference: Course) -> float | None:
    """Mean of |loss - reference's| over the last quarter, as a share of the reference's loss there.

    None where fewer than half of these steps have a finite loss in both.
    """
    pairs = _tail_pairs(course, reference)
    if pairs is None:
        return None
    return statistics.fmean(abs(a - b) for a, b in pairs) / _size(reference, [b for _, b in pairs])


def shift(course: Course, reference: Course) -> float | None:
    """The same of the mean losses, with its sign: what is left when noise averages out. Below 0: lower than reference."""
    pairs = _tail_pairs(course, reference)
    if pairs is None:
        return None
    return statistics.fmean(a - b for a, b in pairs) / _size(reference, [b for _, b in pairs])


def noise(reference: Course) -> float:
    """How much the reference's own loss moves from step to step in its last quarter, as a share of it."""
    tail = [loss for loss in _tail(reference) if loss is not None]
    steps = [abs(b - a) for a, b in itertools.pairwise(tail)]
    return statistics.fmean(steps) / _size(reference, tail) if steps else 0.0


def _tail(course: Course) -> tuple[float | None, ...]:
    return course.losses[-max(1, len(course.losses) // TAIL) :]


def _tail_pairs(course: Course, reference: Course) -> list[tuple[float, float]] | None:
    length = min(len(course.losses), len(reference.losses))
    last = range(length - max(1, length // TAIL), length) if length else range(0)
    both = [(course.losses[i], reference.losses[i]) for i in last]
    pairs = [(a, b) for a, b in both if a is not None and b is not None]
    return pairs if len(pairs) * 2 > len(both) else None


def _size(reference: Course, tail: list[float]) -> float:
    """What a difference is measured against: the loss itself, or where it has vanished, a hundredth of its start."""
    first = next((abs(loss) for loss in reference.losses if loss is not None), 1.0)
    return max(abs(statistics.fmean(tail)), 0.01 * first, 1e-12)
