"""How much of a step's glue is taped: by what the steps so far were like."""

from __future__ import annotations

import math

from ampguard.capture.events.kept_events import MAX_EVENTS, KeptEvents

FREE_GLUE_OPS = 96
"""Operators between a module and backward that are always taped; more only while they cost next to nothing."""

FREE_FUNCTIONAL_OPS = 512
"""The same of a step that calls no module: all of it is glue, and there is nothing else that it could be run again by."""

TAPED_OP_SECONDS = 6e-6
GLUE_TIME_SHARE = 0.01

FREE_SECONDS = 2.0
"""What taping more than that may take of a run beside its share of the time: a short run's steps are all taped whole."""

TAPED_CALL_SECONDS = 1.2e-5
"""What an operator or a call takes that is taped, named and forgotten."""

TAPE_ON_SECONDS = 2.5e-5
"""What it takes to put the tape on and to take it off again."""

TAPED_WRITE_SECONDS = 7e-5
"""The same where most of them write to weights, whose values are copied before."""

LONG_STEP = 0.025
"""Seconds a step, beyond which taping every operator of ordinary glue costs next to nothing."""

MUCH_GLUE = 0.01
"""Share of a step's time that taping its glue operator by operator takes, beyond which it is kept call by call."""

PREFIX_OPS = 48
"""Operators before the first module of a step (preprocessing) that are taped."""

EMPTY_PREFIXES = 4
"""Steps in a row in which nothing that a step needs was computed before its first module, after which it is not taped."""

RARE_PREFIXES = 64
"""The same of a run in which it was needed at times (an agent whose next move comes from no module), after its first step."""

LOOK_AGAIN = 32
"""Steps between two in which it is taped all the same, or in which it is seen whether it is still needed."""

FIRST_PREFIXES = 32
"""Steps at the beginning of a run in all of which it is taped, where it is short."""

SHORT_PREFIX = 8
"""Events up to which it is."""

PREFIX_TIME_SHARE = 0.003
"""Share of a step's time up to which it is taped even where no step needs it: a script may write to its weights there."""

FIRST_STEPS = 2
"""Steps of a run whose time says nothing."""

FIRST_LOOKS = 8
"""Steps at the beginning of a run in each of which it is seen."""


class TapeSchedule:
    """For how many operators the tape is put on, and whether calls or operators are kept."""

    def __init__(self) -> None:
        self._spent = -FREE_SECONDS
        """Seconds that taping beyond the usual has taken, less what it may take: below 0 steps are taped whole."""
        self.limit = MAX_EVENTS
        """Operators that are taped after a module was called."""
        self.training_limit = MAX_EVENTS
        """The same after one that was called with gradients. A step with more of them than `limit` is taped whole or not at all,
        and as often as comes to the same: half a loss cannot be run again."""
        self._is_whole = False
        """Whether the running step is taped whole in its turn."""
        self._resting_steps = 0
        """Steps to come in which none of it is taped."""
        self._cut_at = 0
        """Events of the last step that was cut off."""
        self._was_cut = False
        self._whole_until = 0
        """The step up to which everything is taped."""
        self.keeps_calls = False
        """Whether steps are so short, or hold so much glue, that it is kept call by call."""
        self._has_much_glue = False
        self.is_functional = False
        """True where the last step called no module: all of it ran outside modules."""
        self.tapes_all = False
        """Whether everything is taped that runs between an optimizer's step and the first module, for a while."""
        self.has_no_prefix = False
        """Whether nothing is taped between an optimizer's step and the first module."""
        self._wants_prefix = True
        self._has_prefix = False
        self._prefix_events = 0
        """How many there were before the first module of the last step in which it was taped."""
        self._events_behind_backward = 0
        """How many there were between a backward pass and the update, when that was taped last."""
        self._clears_between_steps = False
        self._tapes_before_clearing = True
        """Whether in a loop that clears its gradients there, what comes before that is taped too."""
        self._unused_before_clearing = 0
        """Steps in a row in which nothing that was computed there was needed."""
        self._empty_prefixes = 0
        self._uses = 0
        """Steps in which what was computed before the first module is known to have been used."""
        self._may_have_more = True
        self.keeps_for_weights = False
        """Whether in this step something was taped that writes to weights, and there is time for more."""
        self._is_prefix_long = False
        """Whether more than preprocessing is computed before the first module: it is taped whole while that is free."""

    def kept_for_weights(self, operators: int) -> None:
        """So many were taped before the first module that write to weights: that is free for a while, and no longer."""
        self._spent += operators * TAPED_WRITE_SECONDS
        self.keeps_for_weights = self._spent < -FREE_SECONDS / 2

    def may_tape_state(self, operators: int, steps: int, usual_seconds: float) -> bool:
        """Whether so many operators may be taped in each of the next steps because they write what the script keeps: where that
        costs next to nothing, or is free for a while."""
        seconds = operators * TAPED_CALL_SECONDS
        is_cheap = seconds <= GLUE_TIME_SHARE * usual_seconds
        if not is_cheap:
            self._spent += seconds * steps
        return is_cheap or self._spent < 0

    def left_for_training(self, log: KeptEvents) -> int:
        """Operators that are taped from here on in a step: what is left of its own, where it calls many modules."""
        if self.is_functional or self.training_limit in (0, MAX_EVENTS):
            return self.glue_limit
        left = self.training_limit - log.size_of_iteration
        if left <= 0:
            self.exhausted(has_root=True)
        return max(0, left)

    def begins(self, events: int) -> None:
        """The first module of a step is called; `events`: how many there were before."""
        self._has_prefix = events > 0
        if not self.has_no_prefix:
            self._prefix_events = events
        if not events:
            self._empty_prefixes += 1
            self._unused_before_clearing += 1

    def wonders(self, steps: int) -> bool:
        """Whether to look if the step that ends has used what was computed before its first module."""
        is_undecided = 0 < self._empty_prefixes < self._enough  # (beyond it is taped where that costs nothing)
        return self._has_prefix and (is_undecided or steps < FIRST_LOOKS or steps % LOOK_AGAIN == 1)

    @property
    def _enough(self) -> int:
        """Steps in a row without need of what was computed before the first module, after which it is not taped."""
        return RARE_PREFIXES if self._uses > 1 else EMPTY_PREFIXES

    def prefix_was(self, used: bool, writes_state: bool = False) -> None:
        """What was computed before the first module (a metric of the last step, say) was used, or not; or `writes_state` that the
        script keeps, which is worth taping as long as there is time for it."""
        self._uses += used
        self._empty_prefixes = 0 if used or writes_state else self._empty_prefixes + 1

    def before_clearing_was(self, used: bool) -> None:
        """What was computed between an optimizer's step and the call that clears the gradients was used in the next, or not."""
        self._unused_before_clearing = 0 if used else self._unused_before_clearing + 1

    def exhausted(self, has_root: bool, is_training: bool = True) -> None:
        """The tape met more operators than it may follow, in a step that has called a module or not.

        `is_training`: in what may be a loss, not in an evaluation or in preprocessing.
        """
        self._was_cut |= is_training
        if not has_root and not self.is_functional and not self._is_prefix_long:
            self._wants_prefix = False

    def ended(self, steps: int, seconds: float, usual_seconds: float, has_root: bool, taped: int) -> None:
        """A step is over: the how manieth, how long it took and steps take, whether it called a module, what was taped."""
        if steps > FIRST_STEPS:
            allowed = max(FREE_GLUE_OPS, int(GLUE_TIME_SHARE * usual_seconds / TAPED_OP_SECONDS))
            more = taped - self._cut_at if self._is_whole or self._resting_steps else max(0, taped - allowed)
            self._spent += more * TAPED_CALL_SECONDS - GLUE_TIME_SHARE * seconds
            self._spent = max(self._spent, -FREE_SECONDS)
            self.limit = self.training_limit = MAX_EVENTS if self._spent < 0 else min(MAX_EVENTS, allowed)
            if has_root and (self._was_cut or self._cut_at):
                self._take_turns(taped)
        usual = min(seconds, usual_seconds)  # a single slow step does not count
        if steps > FIRST_STEPS and taped * TAPED_CALL_SECONDS > MUCH_GLUE * usual:
            self._has_much_glue = True
        self.keeps_calls = self._has_much_glue or usual < LONG_STEP
        self.is_functional = not has_root
        if self.is_functional and taped <= 1:  # its backward pass: it has cleared its gradients behind its loss
            self._clears_between_steps = False
        is_empty = not self._wants_prefix or self._empty_prefixes >= self._enough
        looks_again = self._wants_prefix and (steps % LOOK_AGAIN == 0 or self._is_prefix_cheap(steps, usual))
        self.has_no_prefix = has_root and is_empty and not (looks_again or self.tapes_all)
        self._tapes_before_clearing = self._unused_before_clearing < EMPTY_PREFIXES or looks_again
        self._has_prefix = self.keeps_for_weights = False
        self._may_have_more = True
        if steps < self._whole_until:
            self.has_no_prefix = False
            self.limit = self.training_limit = MAX_EVENTS
        else:
            self._whole_until = 0
        self._was_cut = False

    def _take_turns(self, taped: int) -> None:
        """Say how much of the next step is taped, where steps run more operators than may be taped in each."""
        if self._resting_steps:
            self._resting_steps -= 1
            self._is_whole = not self._resting_steps
        elif self._is_whole:
            self._is_whole = False
            self._resting_steps = max(0, math.ceil(taped / self._cut_at) - 1)
            if not self._resting_steps:
                self._cut_at = 0
        elif self._was_cut and self.limit < MAX_EVENTS:
            self._is_whole = True
            self._cut_at = max(1, taped)
        self.training_limit = MAX_EVENTS if self._is_whole else 0 if self._resting_steps else self.limit

    def attend(self, until: int) -> None:
        """Tape everything up to this step: one failed of which not everything had been. (Where that is now: as usual again.)"""
        self._whole_until = until
        self._wants_prefix = True
        self.has_no_prefix = False
        self.limit = self.training_limit = MAX_EVENTS

    def _is_prefix_cheap(self, steps: int, usual_seconds: float) -> bool:
        return self._is_cheap(self._prefix_events, steps, usual_seconds)

    def tapes_behind_backward(self, steps: int, usual_seconds: float) -> bool:
        """Whether to tape what comes between a backward pass and the update though no step has shown to need it: what runs
        seldom there may write what the script keeps."""
        return steps < FIRST_STEPS or self._is_cheap(self._events_behind_backward, steps, usual_seconds)

    def was_behind_backward(self, events: int) -> None:
        """So many were taped there."""
        self._events_behind_backward = events

    def _is_cheap(self, events: int, steps: int, usual_seconds: float) -> bool:
        """Whether taping so many costs next to nothing, in this loop or because the run has just begun."""
        is_new = steps < FIRST_PREFIXES and events <= SHORT_PREFIX
        return is_new or TAPE_ON_SECONDS + events * TAPED_CALL_SECONDS <= PREFIX_TIME_SHARE * usual_seconds

    def comes_next(self, is_last: bool) -> bool:
        """Whether preprocessing may follow a call of bookkeeping; in a loop that clears gradients, that (`is_last`) or any."""
        if is_last and not self.is_functional:
            self._clears_between_steps = True
        return is_last or self.tapes_all or self._tapes_before_clearing or not self._clears_between_steps

    def more(self) -> int:
        """Operators to be taped beyond those of preprocessing, where that turns out to be the step itself: once a step."""
        may, self._may_have_more = self._may_have_more, False
        return max(self.limit, FREE_FUNCTIONAL_OPS) - PREFIX_OPS if may and not self.is_functional else 0

    def more_before(self) -> int:
        """Operators to be taped beyond those of preprocessing before the first module (an EM step, a clustering of what was
        learned so far): as many as may be, while taping more than the usual is free; once a step."""
        may, self._may_have_more = self._may_have_more, False
        if not may or self._spent >= 0 or not self._wants_prefix:
            return 0
        self._is_prefix_long = True
        return max(0, self.limit - PREFIX_OPS)

    @property
    def glue_limit(self) -> int:
        """Operators that are taped where a step goes on outside modules."""
        return max(self.limit, FREE_FUNCTIONAL_OPS) if self.is_functional else self.training_limit

    @property
    def prefix_limit(self) -> int:
        """Operators that are taped before the first module; 0 for none."""
        if self.is_functional or self.tapes_all:
            return self.glue_limit
        if self.limit == MAX_EVENTS and self._whole_until:
            return self.limit
        if self.has_no_prefix or (self._is_prefix_long and self._spent >= 0):
            return 0
        return PREFIX_OPS
