"""Watches that ranks which should have the same weights, loss scale and skipped steps have them."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.frames import user_line
from ampguard.capture.ranks.by_hand import (
    BEGAN,
    Reduced,
    Unwrapped,
    UnwrappedModels,
    equal_gradients,
    is_weight,
    left_out,
)
from ampguard.capture.ranks.checksums import as_parts, digest_of, from_parts
from ampguard.capture.ranks.outside_wrapper import OutsideWrapper, outside_wrapper
from ampguard.capture.ranks.past_wrapper import PastWrapper
from ampguard.capture.ranks.replicas import Replica, Replicas
from ampguard.capture.ranks.settings import differing_setting, settings_of
from ampguard.capture.record import Line, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.sampling.later import NumbersLater
from ampguard.capture.sampling.vitals import StepVitals
from ampguard.diagnose.cases.casebook import Casebook
from ampguard.diagnose.protocol.rank_divergence import Difference, LeftOut, rank_divergence
from ampguard.incident import Incident
from ampguard.replay.names import module_names, parameters_under, roots_in
from ampguard.replay.variables import script_names
from ampguard.run.dynamics import LearningDynamics
from ampguard.run.ranks_exchange import KEPT, Check, Exchange, Sums, first_here

Model = Replica | Unwrapped | OutsideWrapper

COURSE = 72
"""Steps of which loss scale and skipping are kept: more than lie between two comparisons."""

UNLIKE = 4
"""Comparisons in a row with other gradients, after which a model without a wrapper is each rank's own."""

PROVEN = 2
"""Comparisons in which weights and gradients were the same behind a reduction, after which a model is one that is kept alike."""

PATIENCE_S = 10.0
"""At the end of a run that trained past DDP's wrapper: how long the first rank may take to come as far as this one."""


def is_due(step: int) -> bool:
    """Whether weights are compared after this step: each of the first 8, then every 8th, from 64 on every 64th.

    All ranks must come to the same answer, so it depends on nothing but the step.
    """
    return step < 8 or step % (8 if step < 64 else 64) == 0


class RankWatch:
    """One rank's share of the comparison."""

    def __init__(
        self,
        recorder: FlightRecorder,
        folder: Path,
        rank: int,
        tell: Callable[[Incident], object],
        flush: Callable[[], None],
        on_fault: Callable[[Exception], None],
        attempt: int = 0,
    ) -> None:
        """`flush`: have every step's vital signs handed on, up to the last one.

        `attempt`: how often the ranks were started anew in this folder; each attempt has notes of its own.
        """
        self._recorder = recorder
        self._flush = flush
        self._folder = folder
        self._attempt = attempt
        self._rank = rank
        self._tell = tell
        self._barrier = FaultBarrier(on_fault)
        self._replicas = Replicas()
        self._unwrapped = UnwrappedModels()
        self._outside: OutsideWrapper | None = None
        self._replicas.install(self._barrier.call)
        self._later = NumbersLater()
        self._course: deque[tuple[int, float | None, bool | None]] = deque(maxlen=COURSE)
        self._pairs: dict[int, _Pair] = {}
        self._checks = 0
        """Iterations after which there was something to compare."""
        self._reduced_at: Line | None = None
        """Where the script has reduced gradients since the last comparison."""
        self._is_behind_unscale = False
        """And the scaler had divided them by then."""
        recorder.collectives.on_reduced = self._reduced
        recorder.on_first_update = functools.partial(self._barrier.call, self._first_update)

    def saw(self, vitals: StepVitals) -> None:
        """The vital signs of a step."""
        self._course.append((vitals.step, vitals.scale, vitals.skipped))

    def iteration_ended(self, step: int) -> None:
        """Iteration number `step` is over."""
        if is_due(step):
            self._barrier.call(self._check, self._checks, step)
            self._checks += 1

    def undo(self) -> None:
        """Take the patches out."""
        self._replicas.undo()
        self._recorder.collectives.on_reduced = self._recorder.on_first_update = None

    def close(self) -> None:
        """The run ends: what is left is compared now."""
        self._barrier.call(self._close)

    def _reduced(self, frame: FrameType) -> None:
        """The script has reduced what may be gradients. Before the first update the weights are as they began."""
        if self._reduced_at is not None:
            return
        self._reduced_at = user_line(frame)
        self._is_behind_unscale = self._recorder.scaling.is_unscaled
        self._recorder.collectives.reduces_unscaled |= self._is_behind_unscale
        if not self._recorder.steps.attempts and not self._unwrapped.known and not self._replicas.are_any:
            self._unwrapped.look(self._calls())
            for model in self._unwrapped.known:
                model.begins()

    def _first_update(self) -> None:
        """The weights are as they began, and have gradients."""
        if not self._replicas.are_any:
            return
        calls = self._calls()
        self._replicas.find(calls)
        self._outside = outside_wrapper(calls, self._replicas, names_of)

    def _calls(self) -> list[RootCall]:
        return [event for event in self._recorder.log.record.events if isinstance(event, RootCall)]

    def _check(self, number: int, step: int) -> None:
        calls = self._calls()
        self._replicas.look(calls)
        if not self._replicas.known:
            self._unwrapped.look(calls)
        reduced_at, self._reduced_at = self._reduced_at, None
        for model in self._unwrapped.known:
            model.looks_at(calls, self._recorder.collectives, reduced_at, self._is_behind_unscale)
        known: list[Model] = [*self._replicas.known, *self._unwrapped.known]
        if self._outside is not None:
            self._outside.looks_at(calls, self._recorder.collectives)
            known.append(self._outside)
        if not known:
            return
        self._flush()
        settings = settings_of(self._recorder.steps.lately_stepped)
        for replica in known:
            pair = self._pairs.get(replica.number) or self._pair_up(replica)
            found = replica.sums() if pair is not None else None
            if found is not None and pair is not None:
                names, sums = found
                self._later.ask(as_parts(sums), pair.receiver(number, step, names, replica, settings))
        self._later.poll()

    def _pair_up(self, replica: Model) -> _Pair | None:
        first = first_here(self._folder, replica.ranks)
        if first is None or len(replica.ranks) < 2:
            return None
        exchange = Exchange(self._folder, replica.number, first, self._attempt)
        pair = _Pair(exchange, self._rank, first, self._course, self._tell, replica.by_hand)
        self._pairs[replica.number] = pair
        return pair

    def _close(self) -> None:
        self._flush()
        self._later.poll(wait=True)
        for pair in self._pairs.values():
            pair.close()


class _Pair:
    """This rank and the first of those that hold the same model."""

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        first: int,
        course: deque[tuple[int, float | None, bool | None]],
        tell: Callable[[Incident], object],
        by_hand: bool = False,
    ) -> None:
        """`by_hand`: whether the weights have to be alike, only equal gradients show."""
        self._by_hand = by_hand
        self._unlike = 0
        self._proven = 0
        self._exchange = exchange
        self._rank = rank
        self._first = first
        self._course = course
        self._tell = tell
        self._waiting: deque[tuple[Check, Sums, PastWrapper | None, Reduced | None]] = deque(maxlen=KEPT)
        self._last_equal: int | None = None
        self._has_told = False

    def receiver(
        self, number: int, step: int, names: list[str], replica: Model, settings: dict[str, float]
    ) -> Callable[[list[float | None]], None]:
        past, reduced = replica.past, replica.reduced

        def came(parts: list[float | None]) -> None:
            sums = from_parts(parts)
            compared = [value for name, value in zip(names, sums, strict=True) if not name.startswith(BEGAN)]
            check = Check(number, step, digest_of(compared), list(self._course), settings)
            if self._rank == self._first:
                self._exchange.write(check, Sums(names, sums))
            elif not self._has_told:
                self._waiting.append((check, Sums(names, sums), past, reduced))
                self.compare()

        return came

    def compare(self, is_last: bool = False) -> None:
        """Compare those checks of ours that the first rank has made as well. What it has yet to make is waited for."""
        while self._waiting and not self._has_told:
            mine, sums, past, reduced = self._waiting[0]
            newest = self._exchange.newest()  # before: what comes in between is waited for, not missed
            theirs = self._exchange.check_of(mine.number)
            if theirs is None and not is_last and newest < mine.number:
                return
            self._waiting.popleft()
            if theirs is not None and theirs.step == mine.step:
                self._judge(mine, sums, theirs, past, reduced)

    def close(self) -> None:
        """Compare what is left. Ranks that do not wait for each other in DDP may be far apart: the first is given time."""
        until = time.monotonic() + PATIENCE_S
        self.compare()
        while any(past for _, _, past, _ in self._waiting) and not self._has_told and time.monotonic() < until:
            time.sleep(0.05)
            self.compare()
        self.compare(is_last=True)

    def _judge(self, mine: Check, sums: Sums, theirs: Check, past: PastWrapper | None, reduced: Reduced | None) -> None:
        course = first_difference(mine.course, theirs.course)
        if mine.digest == theirs.digest and course is None:
            self._last_equal = mine.step
            self._proven += reduced is not None
            return
        other = self._exchange.sums_of(mine.number) if mine.digest != theirs.digest else None
        names = [] if other is None else differing(sums, other)
        forgotten: LeftOut | None = None
        is_by_hand = self._by_hand and self._are_averaged(sums, other)
        is_kept_alike = reduced is not None and reduced.wrapped is None and self._proven >= PROVEN
        was_averaged = is_kept_alike and course is not None
        if self._by_hand and not is_by_hand and not was_averaged:
            forgotten = _left_out(sums, other, reduced)
            if forgotten is None:
                return
            names, course = forgotten.names, None
        self._has_told = True
        past = past if names and course is None else None
        of = len([name for name in sums.names if is_weight(name)])
        setting = differing_setting(mine.settings, theirs.settings) if names and forgotten is None else None
        difference = Difference(
            mine.step,
            self._rank,
            self._first,
            self._last_equal,
            names,
            of,
            course,
            past,
            is_by_hand,
            setting,
            forgotten,
            reduced if was_averaged else None,
        )
        self._tell(rank_divergence(difference, mine.digest))

    def _are_averaged(self, mine: Sums, theirs: Sums | None) -> bool:
        """Whether the script keeps this model alike. Ranks whose gradients are never equal are not asked again."""
        alike = (
            theirs is not None and theirs.names == mine.names and equal_gradients(mine.names, mine.sums, theirs.sums)
        )
        self._unlike = 0 if alike else self._unlike + 1
        self._has_told = self._unlike >= UNLIKE
        return alike


def watch_ranks(
    recorder: FlightRecorder,
    dynamics: LearningDynamics,
    casebook: Casebook,
    folder: Path,
    rank: int,
    on_fault: Callable[[Exception], None],
    attempt: int,
) -> RankWatch:
    """A watch that hears of every step and tells the casebook."""
    watch = RankWatch(recorder, folder, rank, casebook.add, dynamics.flush, on_fault, attempt)
    dynamics.on_vitals = watch.saw
    return watch


Course = list[tuple[int, float | None, bool | None]]


def first_difference(mine: Course, theirs: Course) -> tuple[int, str, object, object] | None:
    """The first step, known to both, in which the loss scale or skipping differs: step, which, mine, theirs."""
    known = {step: (scale, skipped) for step, scale, skipped in theirs}
    for step, scale, skipped in mine:
        other_scale, other_skipped = known.get(step, (scale, skipped))
        if scale is not None and other_scale is not None and scale != other_scale:
            return step, "scale", scale, other_scale
        if skipped is not None and other_skipped is not None and skipped != other_skipped:
            return step, "skipped", skipped, other_skipped
    return None


def names_of(calls: Sequence[RootCall]) -> dict[int, str]:
    """The names of the parameters of what is called, by identity; of several models each with the name of its own."""
    roots = {id(root): root for call in calls for root in roots_in(call.module)}
    variables = script_names(list(roots.values())) if len(roots) > 1 else {}
    names: dict[int, str] = {}
    for call in calls:
        for root in roots_in(call.module):
            known = module_names(root, call.prefix or variables.get(id(root), ""))
            names |= parameters_under(root, known)
    return names


def _left_out(mine: Sums, theirs: Sums | None, reduced: Reduced | None) -> LeftOut | None:
    """What the script has forgotten to average; None where it may be each rank's own on purpose."""
    if reduced is None or theirs is None or mine.names != theirs.names:
        return None
    own, same = left_out(mine.names, mine.sums, theirs.sums, reduced.matrices)
    wrapped = reduced.wrapped
    return LeftOut(own, len(same) + (wrapped or 0), reduced.line, wrapped is not None) if own else None


def differing(mine: Sums, theirs: Sums) -> list[str]:
    """The weights that differ; all where the two do not even hold the same."""
    if mine.names != theirs.names:
        return sorted(set(mine.names) ^ set(theirs.names)) or mine.names
    pairs = zip(mine.names, mine.sums, theirs.sums, strict=True)
    return [name for name, a, b in pairs if a != b and not name.startswith(BEGAN)]
