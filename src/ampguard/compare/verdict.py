"""Which precision suits the script, and why."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ampguard.compare.course import OUTPUT, Course
from ampguard.compare.distance import noise, shift

SAME_LOSS = 0.02
"""A loss within 2 % of the reference's is the same; so is one within the reference's own noise."""
SKIPPED_SHARE = 0.05
"""Of the second half's steps: before it a loss scale settles."""
TIMED_STEPS = 20
"""Steps that are needed before one time is called shorter than another."""
NOTHING_GAINED = "no other precision is faster or smaller on this device"
ROSE = 10.0
"""A loss that ends so many times above the largest that it began with has not been trained."""
WORTH = 0.05
"""Time or memory saved, from which on it is worth another precision."""


class Verdict(msgspec.Struct, frozen=True):
    """`recommended` is None where none of the precisions can be recommended. `against`: why each of the others is not."""

    recommended: str | None
    reason: str
    against: dict[str, str] = {}


def recommend(courses: Sequence[Course]) -> Verdict:
    """The cheapest precision that trains as the reference does; the reference is float32, or else the first."""
    reference = next((c for c in courses if c.precision == "fp32"), courses[0])
    against = {c.precision: why for c in courses if (why := _fault(c, reference)) is not None}
    sound = [c for c in courses if c.precision not in against]
    if reference.precision in against:
        return _without_reference(reference, sound, against)
    best = min((c for c in sound if c is not reference), key=_cost, default=None)
    if best is None:
        alone = "nothing else was run" if len(courses) == 1 else "nothing else trains as it does"
        return Verdict(reference.precision, alone, against)
    gain = _gain(best, reference)
    if gain is None:
        few = reference.steps < TIMED_STEPS
        why_not = f"no smaller, and from {TIMED_STEPS} steps on times would be compared" if few else "no cheaper here"
        others = {c.precision: why_not for c in sound if c is not reference}
        reason = f"{reference.steps} steps are too few to compare times" if few else NOTHING_GAINED
        return Verdict(reference.precision, reason, {**others, **against})
    moved = shift(best, reference) or 0.0
    against |= {c.precision: _dearer(c, best) for c in sound if c is not best}
    return Verdict(best.precision, f"{gain}; its loss is {_moved(moved)} {reference.precision}'s", against)


def _fault(course: Course, reference: Course) -> str | None:
    """Why a precision does not do; None where it trains as the reference does."""
    if course.trouble is not None:
        return course.trouble
    if course.status != 0:
        told = _by(course) or f"; what it printed is in {course.folder}-{OUTPUT}"
        return f"the script ended with status {course.status}{told}"
    if course.steps == 0:
        return "no optimizer step was made"
    if course.errors:
        return ("not finite" if course.nonfinite else "an error was found") + _by(course)
    if (rise := _rise(course)) is not None:
        return rise
    late = max(1, course.steps - course.steps // 2)
    if course.skipped_late > SKIPPED_SHARE * late:
        return f"{course.skipped_late} of its last {late} steps were skipped"
    moved = shift(course, reference) if course is not reference else 0.0
    if moved is None:
        return "its losses cannot be compared"
    if moved > max(SAME_LOSS, noise(reference)):
        return f"its loss is {_moved(moved)} {reference.precision}'s"
    return None


def _rise(course: Course) -> str | None:
    """That the loss ended far above where it began; None where it did not."""
    began = [loss for loss in course.losses[: max(5, len(course.losses) // 10)] if loss is not None]
    ended = course.final_loss
    if len(course.losses) < 2 * len(began) or not began or ended is None or not 0 < max(began) * ROSE < ended:
        return None
    return f"its loss rose from {max(began):.4g} to {ended:.4g}"


def _without_reference(reference: Course, sound: list[Course], against: dict[str, str]) -> Verdict:
    why = against[reference.precision]
    if not sound:
        return Verdict(
            None, f"{reference.precision} itself does not train ({why}): precision is not the cause", against
        )
    best = min(sound, key=_cost)
    return Verdict(best.precision, f"{reference.precision} itself does not train ({why}); this one does", against)


def _by(course: Course) -> str:
    """`: fp16-overflow in blocks.3.attn, first in step 41`"""
    if not course.errors:
        return ""
    first = course.errors[0]
    place = f" in {first.module}" if first.module else ""
    return f": {first.cause}{place}, first in step {first.step}"


def _cost(course: Course) -> tuple[float, float]:
    return (course.step_seconds or float("inf"), course.memory_mib or float("inf"))


def _gain(course: Course, reference: Course) -> str | None:
    """What a precision saves, in words; None where it is not worth it."""
    if min(course.steps, reference.steps) < TIMED_STEPS:
        return None
    if course.step_seconds and reference.step_seconds and course.step_seconds < (1 - WORTH) * reference.step_seconds:
        return f"{reference.step_seconds / course.step_seconds:.2f} times as fast as {reference.precision}"
    is_no_slower = not (course.step_seconds and reference.step_seconds) or (
        course.step_seconds <= (1 + WORTH) * reference.step_seconds
    )
    saves = course.memory_mib and reference.memory_mib and course.memory_mib < (1 - WORTH) * reference.memory_mib
    if saves and is_no_slower and course.memory_mib and reference.memory_mib:
        return f"{1 - course.memory_mib / reference.memory_mib:.0%} less memory than {reference.precision}"
    return None


def _dearer(course: Course, best: Course) -> str:
    if course.step_seconds and best.step_seconds and course.step_seconds > best.step_seconds:
        return f"{course.step_seconds / best.step_seconds:.2f} times {best.precision}'s time"
    return f"no better than {best.precision}"


def _moved(share: float) -> str:
    if abs(share) < 0.001:
        return "the same as"
    return f"{abs(share):.1%} {'above' if share > 0 else 'below'}"
