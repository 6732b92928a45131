"""Would a smaller learning rate, or clipping, have kept the run in its range? Tried on the stretch of steps that failed.

The steps are run again unchanged first: they must give the losses that were seen, and fail. Then with smaller learning
rates, then with gradients clipped to the norm that was usual before. A remedy is verified if every step stays finite, no loss
leaves the range that was seen before (or, where the first step that was kept had left it, it comes back into it), and the updates
are still made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import median

from ampguard.capture.sampling.copies import wide_norm
from ampguard.capture.sampling.rates import rate_of_group
from ampguard.diagnose.dynamics.trajectory import Trajectory
from ampguard.diagnose.words import number
from ampguard.errors import ReplayError
from ampguard.replay.stretch import Course, StretchReplay
from ampguard.replay.stretch_updates import Change

SAME_LOSS = 1e-3
"""Relative difference up to which a replayed loss is the one that was seen, and replayed weights are the same."""
LEFT_RANGE = 2.0
ORDINARY = 10.0
"""Times the loss that was seen last: up to it, a batch is like the others."""
ORDINARY_AT_FIRST = 100.0
"""Times the run's first loss, of which nothing else is known: it may have been near 0 by chance."""
MANY_SKIPPED = 0.5
RATE_FACTORS: tuple[float, ...] = (0.1, 0.01)
ORDINARY_UPDATE = 0.01
"""Of the weights' norm: what one of the first updates may move them by."""
NORMS_OF_BEFORE = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a remedy came to. `change` is the one that was tried last: the one that works, where one does."""

    verified: bool | None
    outcome: str | None
    change: Change | None = None


@dataclass(slots=True)
class Remedies:
    """The verdicts on a stretch. `is_weights_doing`: the failing step is healthy on the weights of before."""

    lower_rate: Verdict
    clip: Verdict
    began_at: int | None = None
    """The last step whose loss was within the range of before."""
    moved: float | None = None
    """||weights now - weights then|| / ||weights then||."""
    norm_before: float = 0.0
    """The norm of the weights that the stretch began with."""
    is_weights_doing: bool = False
    fails_before: bool = False
    """Whether the failing step is not even finite on the weights that the stretch began with."""
    bears_others: bool = False
    """Whether the weights of now give an ordinary loss on an earlier batch."""
    rate_was_raised: bool = False
    """Whether the learning rate was raised just before the stretch, and what it was then."""
    rate_before: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)
    bound: float = math.inf
    """Beyond it a |loss| has left its range."""
    updates: int = 0
    is_of_first_steps: bool = False
    """Whether the stretch is the run's beginning: what is usual is not known."""
    reason: str = ""
    """What raised the alarm."""
    noticed_at: int = 0

    def without_trial(self, why: str) -> Remedies:
        """What is known, where no remedy can be tried."""
        self.lower_rate = self.clip = Verdict(None, f"not tried: {why}")
        return self


def try_remedies(replay: StretchReplay, trajectory: Trajectory, even_if_data: bool) -> Remedies:
    """Replay the stretch as it ran and with each remedy. Never raises what a replay raises: it becomes the reason.

    `even_if_data`: also where the failing step fails on the weights of before as well.
    """
    stretch = replay.stretch
    if stretch.refusal is not None:
        return untried(stretch.refusal)
    if len(stretch.steps) < 2:
        return untried("the updates that led to it came before anything looked unusual")
    remedies = untried("")
    first = abs(replay.loss_of(stretch.steps[0]) or 0.0)
    remedies.is_of_first_steps = stretch.first_update is not None
    usual = stretch.highest if replay.only is None else highest_before(trajectory, stretch.steps[0].number)
    usual = usual or (first if remedies.is_of_first_steps else 0.0)
    remedies.bound = max(LEFT_RANGE * usual, first)
    remedies.noticed_at, remedies.reason = stretch.steps[0].number, stretch.reason
    remedies.rate_was_raised, remedies.rate_before = was_raised(replay), stretch.rate
    try:
        before = ask_weights_of_before(replay, trajectory, remedies)
        if not remedies.is_weights_doing and not even_if_data:
            far = "fails" if before is None or remedies.fails_before else f"has a loss of {number(before.highest)}"
            return remedies.without_trial(f"the step {far} on the weights of before as well")
        if before is not None and remedies.is_weights_doing:
            usual = max(usual, before.highest if remedies.is_of_first_steps else 0.0)
        ran = replay.as_it_ran()
        why = why_not_reproduced(replay, ran)
        if why is None:
            replay.learn_clipping()
    except Exception as error:
        return remedies.without_trial(f"the steps before it could not be run again: {in_words(error)}")
    if why is not None:
        return remedies.without_trial(why)
    trial = Trial(replay, ran, usual, remedies.bound)
    remedies.lower_rate = trial.of(or_of_all(rate_changes(replay), replay))
    remedies.clip = trial.of(or_of_all(clip_changes(trajectory, stretch.steps[0].number), replay))
    within = [step for step, loss in ran.losses if abs(loss) <= remedies.bound]
    remedies.began_at = within[-1] if within else None
    remedies.losses, remedies.updates, remedies.moved = ran.losses, ran.updates, stretch.moved()
    remedies.norm_before = wide_norm([then for _, then in stretch.snapshot.pairs()])
    return remedies


def ask_weights_of_before(replay: StretchReplay, trajectory: Trajectory, remedies: Remedies) -> Course | None:
    """Is it the weights or the batch? The failing step on the weights of before, an earlier one on those of now."""
    try:
        before = replay.failing_step_before()
    except Exception:
        if replay.stretch.is_closed:
            return None  # the steps that were kept may be run again without it
        raise
    first = abs(replay.loss_of(replay.stretch.steps[0]) or 0.0)
    if remedies.is_of_first_steps and before.highest <= ORDINARY_AT_FIRST * first:
        remedies.bound = max(remedies.bound, LEFT_RANGE * before.highest)
    remedies.is_weights_doing = is_healthy(before, max(remedies.bound, LEFT_RANGE * first))
    remedies.fails_before = before.failed_at is not None
    remedies.bears_others = remedies.fails_before and bears_others(replay, trajectory)
    return before


def highest_before(trajectory: Trajectory, step: int) -> float:
    """The largest |loss| before a step."""
    return max((abs(loss) for number, loss in trajectory.loss_series() if number < step), default=0.0)


def is_healthy(course: Course, bound: float) -> bool:
    """Whether all steps are finite and no loss is out of its range."""
    return course.failed_at is None and course.highest <= bound


def bears_others(replay: StretchReplay, trajectory: Trajectory) -> bool:
    """Whether an earlier batch, on the weights of now, has a loss of the size that was seen last."""
    losses = trajectory.loss_series()
    try:
        course = replay.earlier_step_now()
    except Exception:  # it cannot be run again: nothing is known
        return False
    return bool(losses) and course.failed_at is None and course.highest <= ORDINARY * abs(losses[-1][1])


def untried(why: str) -> Remedies:
    verdict = Verdict(None, f"not tried: {why}")
    return Remedies(verdict, verdict)


def why_not_reproduced(replay: StretchReplay, ran: Course) -> str | None:
    """Why the replayed steps are not those that were seen; None where they are, and fail as they did."""
    steps = replay.stretch.steps
    replayed = dict(ran.totals)
    for step in steps if replay.stretch.is_closed else steps[:-1]:
        seen = step.loss
        if seen is None or not math.isfinite(seen):
            continue
        again = replayed.get(step.number)
        if again is None:
            return f"not reproduced: the loss of step {step.number} was {number(seen)}, and no replay has it"
        if not math.isclose(again, seen, rel_tol=SAME_LOSS, abs_tol=1e-12):
            return f"not reproduced: run again, step {step.number} has a loss of {number(again)}, and it was {number(seen)}"
    if replay.stretch.is_closed:
        return None
    if ran.weights_apart is not None and ran.weights_apart > SAME_LOSS:
        return (
            "not reproduced: run again, these steps lead to other weights (something changed them or their gradients)"
        )
    if ran.failed_at is None:
        return "not reproduced: run again, these steps do not fail"
    return None if ran.losses else "none of these steps had a finite loss"


def or_of_all(changes: list[Change], replay: StretchReplay) -> list[Change]:
    """Where one of several optimizers is asked about: its updates alone, then those of all."""
    return changes if replay.only is None else changes + [replace(change, of_all=True) for change in changes]


def rate_changes(replay: StretchReplay) -> list[Change]:
    """The rate from before it was raised, where it was; then, and else, a tenth, and a hundredth."""
    if not rates_of(replay):
        return []
    if was_raised(replay):
        return [Change(max_rate=replay.stretch.rate * factor) for factor in (1.0, *RATE_FACTORS)]
    factors = RATE_FACTORS
    size = replay.stretch.first_update
    if size is not None and size > ORDINARY_UPDATE / RATE_FACTORS[-1]:
        factors = (*factors, 10.0 ** math.floor(math.log10(ORDINARY_UPDATE / size)))
    return [Change(rate_factor=factor) for factor in factors]


def was_raised(replay: StretchReplay) -> bool:
    """Whether the learning rates of these steps are far above those of before."""
    return 0 < replay.stretch.rate < max(rates_of(replay), default=0.0) / 2


def rates_of(replay: StretchReplay) -> list[float]:
    """The learning rates of all updates of the stretch."""
    updates = [u for step in replay.stretch.steps for u in step.updates if replay.only in (None, u.optimizer)]
    return [rate_of_group(o) for update in updates for o in update.options if "lr" in o]


def clip_changes(trajectory: Trajectory, begin: int) -> list[Change]:
    """Clipping to the median of the gradient norms that were measured before the stretch; to 1 where none was."""
    norms = [norm for step, norm in (*trajectory.norms.points, *trajectory.recent_norms()) if step < begin]
    usual = median(norms[-NORMS_OF_BEFORE:]) if norms else 1.0
    return [Change(max_norm=float(f"{usual or 1.0:.2g}"))]


@dataclass(frozen=True, slots=True)
class Trial:
    """Changes tried on one stretch."""

    replay: StretchReplay
    ran: Course
    usual: float
    """The largest |loss| that was usual."""
    bound: float

    def of(self, changes: list[Change]) -> Verdict:
        """The first change that works, or the last that does not."""
        verdict = Verdict(None, "not tried: the optimizer has no learning rate")
        for change in changes:
            try:
                course = self.replay.with_change(change)
            except Exception as error:
                return Verdict(None, f"not tried: {in_words(error)}", change)
            verdict = self._judged(course, change)
            if verdict.verified:
                break
        return verdict

    def _judged(self, course: Course, change: Change) -> Verdict:
        steps = self.replay.stretch.steps
        which = f"steps {steps[0].number} to {steps[-1].number} replayed"
        wrong = self._what_is_wrong(course)
        if wrong is None and not self._is_seen_behind_an_update(course):
            return Verdict(None, f"{which}: all finite, but no loss shows what the changed updates led to", change)
        if wrong is None:
            goes_to = f"the loss goes to {number(course.losses[-1][1])}{whose_batch(course)}"
            return Verdict(True, f"{which}: all finite, {goes_to}", change)
        if self._begins_too_late():
            late = f"the loss had left its range before step {steps[0].number} already: from the beginning it was not tried"
            return Verdict(None, f"{which}: {wrong}, but {late}", change)
        return Verdict(False, f"{which}: {wrong}", change)

    def _what_is_wrong(self, course: Course) -> str | None:
        if course.failed_at is not None:
            return f"step {course.failed_at} is still not finite"
        if course.highest > self._limit():
            return f"the loss still rises to {number(course.highest)}{whose_batch(course)}"
        if course.skipped > max(1, MANY_SKIPPED * (course.updates + course.skipped)):
            return f"{course.skipped} updates are still skipped"
        last, usual = course.losses[-1][1], self.usual
        if abs(last) > LEFT_RANGE * usual > 0:
            return f"the loss does not come back: it is {number(last)}, and had been {number(usual)} at most"
        return None

    def _is_seen_behind_an_update(self, course: Course) -> bool:
        """Whether a loss was computed with weights that a changed update had made: any but that of the first step."""
        return any(step > self.replay.stretch.steps[0].number for step, _ in course.losses)

    def _limit(self) -> float:
        """What the loss may rise to. Where it had left its range already, momentum carries it on before it comes back."""
        first = abs(self.replay.loss_of(self.replay.stretch.steps[0]) or 0.0)
        return max(self.bound, LEFT_RANGE * first) if self._begins_too_late() else self.bound

    def _begins_too_late(self) -> bool:
        """Whether the updates that did it came before the first step that was kept: a remedy cannot undo them."""
        return abs(self.replay.loss_of(self.replay.stretch.steps[0]) or 0.0) > LEFT_RANGE * self.usual > 0


def whose_batch(course: Course) -> str:
    """Where the last loss is not that of the step that failed: whose it is, in brackets."""
    if course.seen_by is None:
        return ""
    return f" (that of step {course.seen_by}, once more: the one that failed has none)"


def in_words(error: Exception) -> str:
    """The reason of a replay that did not come about."""
    return str(error) if isinstance(error, ReplayError) else f"{type(error).__name__}: {error}"[:200]
