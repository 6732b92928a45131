"""Where the tape may rest: after module calls whose glue was the same in several steps in a row (see `rested`).

While steps are taped they are learnt from. Once they agree, the tape stays off after those calls, and each step keeps
only the few tensors that its operators cannot be told without. Now and then a step is taped all the same and compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ampguard import compat
from ampguard.capture.record import Event, Line, Ref, RootCall
from ampguard.capture.rested import Plan, plan_of

COMPARED_STEPS = 2
"""Steps in a row that must have taught the same as the one before them."""

ALIKE_STEPS = 24
"""Steps in a row after which the tape rests; beyond those compared, as many operators is the same."""

RELEARN_STEPS = 256
"""Every so often a step is taped all the same."""

LONG_STEP = 0.025
"""Seconds a step, beyond which taping its glue costs next to nothing."""

FIRST_LESSON = 1
LESSON_STEPS = 40
STRANGE_STEPS = 4
"""Steps that a lesson may take, and those that may not rest in it; the next begins after four times as many steps."""

_Place: TypeAlias = tuple[int, int, bool]
"""A line (identity of its code, number), and whether the module was in training."""


@dataclass(slots=True)
class _Learnt:
    plan: Plan
    alike: int
    events: int
    """How many were recorded."""
    at: Line
    """Holds on to the code whose identity is the key."""


class RestingTape:
    """Learns what the tape records, and says where it may rest."""

    def __init__(self) -> None:
        self.is_learning = False
        self.is_resting = False
        """Whether the tape was left off after the last module call."""
        self._learnt: dict[tuple[int, int], _Learnt] = {}
        self._places: dict[_Place, Line] = {}
        self._called: dict[_Place, Line] = {}
        self._steps = 0
        self._lesson_at = FIRST_LESSON
        self._relearn_at = 0
        self._is_strange = False
        self._strange_steps = 0

    def may_rest(self, root: RootCall) -> bool:
        """Whether what follows this call need not be taped."""
        line = root.line
        self.is_resting = False
        if line is None or not root.modes.grad:
            return False
        place = (id(line.code), line.number, root.training)
        if place in self._places:
            self.is_resting = True
        elif self.is_learning:
            self._called[place] = line
            if compat.keeps_by_hooks():
                self._is_strange = True
        return self.is_resting

    def plan_at(self, line: Line | None) -> Plan | None:
        """What was learnt of the backward call at this line."""
        learnt = self._learnt.get((id(line.code), line.number)) if line is not None else None
        return learnt.plan if learnt is not None else None

    def learn(
        self, events: Sequence[Event], results: Sequence[Ref | None], node: Any, scale: Any, at: Line | None
    ) -> None:
        """A taped step is about to be differentiated at the line `at`: compare it with what is known of that line."""
        if at is None or self._is_strange:
            self._is_strange = True
            return
        key = (id(at.code), at.number)
        known = self._learnt.get(key)
        is_compared = known is None or known.alike < COMPARED_STEPS or known.alike >= ALIKE_STEPS
        if known is not None and not is_compared and len(events) == known.events:
            known.alike += 1
            return
        plan = plan_of(events, results, node, scale)
        if plan is None:
            self._is_strange = True
            return
        alike = known.alike + 1 if known is not None and known.plan == plan else 0
        self._learnt[key] = _Learnt(plan, alike, len(events), at)

    def spoil(self) -> None:
        """Something happened that cannot be read off the graph: this step is to be taped, and those like it."""
        self._is_strange = True

    def iteration_ended(self, seconds: float) -> None:
        """An iteration is over: is the next one learnt from, may it rest? `seconds`: what one takes."""
        self._steps += 1
        if seconds > LONG_STEP:
            self._places, self.is_learning = {}, False
            self._learnt.clear()
            self._lesson_at = self._steps
            return
        if self._is_strange:
            self._forget()
        if self._places:
            if self._steps >= self._relearn_at:
                self._places = {}
                self.is_learning, self._lesson_at = True, self._steps
        elif self.is_learning:
            if self._learnt and all(learnt.alike >= ALIKE_STEPS for learnt in self._learnt.values()):
                self._places, self.is_learning = self._called, False
                self._relearn_at = self._steps + RELEARN_STEPS
            elif self._steps >= self._lesson_at + LESSON_STEPS:
                self._end_lesson()
        elif self._steps >= self._lesson_at:
            self.is_learning = True
        self._called = {}

    def _forget(self) -> None:
        self._is_strange = False
        self._learnt.clear()
        if self._places:
            self._places = {}
            self.is_learning, self._lesson_at = True, self._steps
        elif self.is_learning:
            self._strange_steps += 1
            if self._strange_steps >= STRANGE_STEPS:
                self._end_lesson()

    def _end_lesson(self) -> None:
        self.is_learning = False
        self._learnt.clear()
        self._strange_steps = 0
        self._lesson_at = 4 * self._steps
