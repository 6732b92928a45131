"""Which lines outside modules leave state to later steps: learned from what outlives the step that it was made in."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import TypeAlias

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.events.log import EventLog
from ampguard.capture.events.operands import held_by, leaves, refs_of
from ampguard.capture.flags import is_immediate
from ampguard.capture.frames import lines_met
from ampguard.capture.glue.schedule import TapeSchedule
from ampguard.capture.glue.taped_calls import TapedCall, WritingCall
from ampguard.capture.record import BackwardCall, Event, GlueOp, Held, Line, Ref
from ampguard.capture.steps import StepCounter

FIRST_STEPS = 4
"""Steps at the beginning of a run after each of which it is seen what outlives them."""

LEARN_EVERY = 64
"""The same later, of two steps in a row, in the middle of so many."""

ASK_EVERY = 32
"""Steps after which it is asked again whether there is time for taping what writes state outside a step's own computation."""

LARGEST = 1 << 16
"""Elements up to which state is looked at."""

MOST_OF_A_LINE = 64
"""Tensors that are remembered of one line."""

MOST_VIEWS = 4
"""Of views of views that are written to, so many are followed to the whole."""

Place: TypeAlias = tuple[int, int]
"""A line of code: the code object's identity, and the line's number."""


@dataclass(slots=True)
class _Left:
    """What a step may have left: made at this line, or written to in part."""

    ref: weakref.ref[Tensor]
    index: int
    line: Line
    is_whole: bool
    """Whether the tensor was there before, and the line wrote to a part of it."""
    is_between_steps: bool
    is_behind_backward: bool


@dataclass(slots=True)
class Leaving:
    """A line that leaves state."""

    code: CodeType
    """Its identity is no other's as long as it lives."""
    wholes: list[weakref.ref[Tensor]] = field(default_factory=list)
    """What it writes to in parts."""
    was_good: bool = False
    """Whether what it has left was ever seen to be finite: what is bad from the start is no news."""
    bad: list[weakref.ref[Tensor]] = field(default_factory=list)
    """What it has left since it was told of first, all of it bad."""


class LeavingLines:
    """Sees what outlives each of the first steps, and of some later ones; keeps the lines that have made it."""

    def __init__(self, log: EventLog, steps: StepCounter) -> None:
        self._log = log
        self._steps = steps
        self.lines: dict[Place, Leaving] = {}
        self._left: list[_Left] = []
        """What the last step has left, if it was seen."""
        self._met = 0
        """Lines that had been met when the last iteration ended: one that runs seldom is seen when it does."""
        self._early: list[_Left] = []
        """What this step may leave of before its first module, where lines were met that had not been: an evaluation may come
        first, and what was done before it is forgotten."""
        self._met_early = 0
        self.is_behind_backward = False
        """Whether state is written between a backward pass and the optimizer's step, and that is taped."""
        self.is_between_steps = False
        """Whether it is written before the first module of a step, or behind the last update, and that is taped."""
        self._taped = 0, 0
        """Events of a step that were taped because of these."""

    def rest(self, keep: Iterable[Place]) -> None:
        """Nothing more is learned; only these lines are still followed."""
        kept = set(keep)
        self.lines = {place: leaving for place, leaving in self.lines.items() if place in kept}
        self._left, self._early = [], []
        self.is_between_steps &= bool(self.lines)
        self.is_behind_backward &= bool(self.lines)

    def taped(self, schedule: TapeSchedule, usual_seconds: float) -> None:
        """A step ends. Now and then it is asked again whether there is time for taping what it is not needed for."""
        if (self._steps.count - 1) % ASK_EVERY == ASK_EVERY - 1 and (self.is_behind_backward or self.is_between_steps):
            before, behind = self._taped
            self.is_between_steps &= schedule.may_tape_state(before, ASK_EVERY, usual_seconds)
            self.is_behind_backward &= schedule.may_tape_state(behind, ASK_EVERY, usual_seconds)

    def iteration_ends(self, first_root: int) -> None:
        """See what the step that ends has left. `first_root`: its first call of a module."""
        step = self._steps.count - 1
        if self._left:
            read = self._read_of_earlier_steps()
            for left in self._left:
                if left.ref() is not None or left.index in read:  # it has outlived a further step, or that has read it
                    self._leaves(left)
            self._left = []
        met, self._met = self._met, lines_met()
        if step < FIRST_STEPS or step % LEARN_EVERY - LEARN_EVERY // 2 in (0, 1) or self._met > met:
            self._left = list(self._left_by(first_root))
        known = {left.index for left in self._left}
        self._left += [left for left in self._early if left.index not in known]
        self._early = []

    def step_begins(self) -> None:
        """The first module of a step is called."""
        if lines_met() > self._met_early:
            self._met_early = lines_met()
            self._early = list(self._left_by(self._log.next_index))
        if any(left.is_between_steps for left in self._left):
            read, given = self._read_before_first_module()
            for left in self._left:  # (alive it may be as a variable of the script's that is not bound anew yet)
                if left.is_between_steps and (left.index in read or id(left.ref()) in given):
                    self._leaves(left)

    def _read_of_earlier_steps(self) -> set[int]:
        """The events of earlier steps whose results an event of this one was given."""
        events, began = self._log.record.events, self._log.iteration_start
        return {ref.event for event in events if event.index >= began for ref in refs_of(event) if ref.event < began}

    def _read_before_first_module(self) -> tuple[set[int], set[int]]:
        """What has been read since the last step: events of before, and tensors by identity."""
        read: set[int] = set()
        given: set[int] = set()
        for event in self._log.kept_since(self._log.iteration_start):
            if isinstance(event, TapedCall):
                given |= {id(value) for value in leaves(event.operands) if isinstance(value, Tensor)}
            elif isinstance(event, GlueOp):
                read |= {ref.event for ref in refs_of(event)}
                given |= {id(held.tensor) for held in held_by(event)}
        return read, given

    def _leaves(self, left: _Left) -> None:
        leaving = self.lines.setdefault(place_of(left.line), Leaving(left.line.code))
        if left.is_whole and all(ref() is not left.ref() for ref in leaving.wholes):
            leaving.wholes = [*(ref for ref in leaving.wholes if ref() is not None), left.ref][-MOST_OF_A_LINE:]
        self.is_between_steps |= left.is_between_steps
        self.is_behind_backward |= left.is_behind_backward

    def _left_by(self, first_root: int) -> Iterator[_Left]:
        record, began = self._log.record, self._log.iteration_start
        weights = {compat.storage_key(p) for parameters in self._log.written.roots() for p in parameters} - {0}
        passes = [e.index for e in record.events if type(e) is BackwardCall and not e.is_functional]
        last_pass = passes[-1] if passes else self._log.next_index
        own = [event.index for event in record.events if event.index >= began]
        self._taped = sum(index < first_root for index in own), sum(index > last_pass for index in own)
        for event in record.events:
            if event.index < began or not isinstance(event, GlueOp) or event.line is None:
                continue
            flags = event.index < first_root, event.index > last_pass
            whole = self._written_in_part(event)
            if whole is not None and may_be_state(whole) and compat.storage_key(whole) not in weights:
                yield _Left(weakref.ref(whole), event.index, event.line, True, *flags)
            for ref in event.outputs:
                tensor = ref()
                if tensor is not None and may_be_state(tensor) and compat.storage_key(tensor) not in weights:
                    yield _Left(ref, event.index, event.line, False, *flags)

    def _written_in_part(self, event: GlueOp) -> Tensor | None:
        """The script's own tensor to a part of which an operator has written (`rows[i] = ...`)."""
        held = self.written_by(event)
        return held.tensor if held is not None and isinstance(event.args[0], Ref) else None

    def written_by(self, event: GlueOp) -> Held | None:
        """What an operator has written to, if that was there before; also through views."""
        operand = event.args[0] if event.args and is_write(event) else None
        for _ in range(MOST_VIEWS):
            if not isinstance(operand, Ref):
                break
            maker = self._log.record.event(operand.event)
            operand = maker.args[0] if isinstance(maker, GlueOp) and maker.args else None
        return operand if isinstance(operand, Held) else None

    def leave_nan(self, events: list[Event], seen: int) -> None:
        """Of lines that run seldom and were met for the first time just now, those that have made NaN may leave it to later
        steps: nobody has seen them leave anything yet. (An infinity would be a mask, or a number to begin with.) `seen`: the
        lines that had been met before."""
        for event in events:
            line = event.line
            if line is None or line.since <= seen or place_of(line) in self.lines or not isinstance(event, GlueOp):
                continue
            live = (ref() for ref in event.outputs)
            if any(t is not None and may_be_state(t) and is_immediate(t) and bool(t.isnan().any()) for t in live):
                self.lines[place_of(line)] = Leaving(line.code, was_good=True)


def place_of(line: Line | None) -> Place:
    return (id(line.code), line.number) if line is not None else (0, 0)


def is_write(event: Event) -> bool:
    """Whether an operator outside modules has written to its first operand."""
    return type(event) is WritingCall or (type(event) is GlueOp and 0 in compat.positions_written(event.func))


def may_be_state(tensor: Tensor) -> bool:
    """Whether a result may be what a script keeps: ordinary numbers, not many, that are no weights and want no gradient."""
    return (
        tensor.is_floating_point()
        and not tensor.requires_grad
        and not isinstance(tensor, nn.Parameter)
        and tensor.numel() <= LARGEST
        and compat.has_values(tensor)
        and compat.is_dense(tensor)
    )
