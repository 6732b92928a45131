"""State that a script keeps beside its modules: running figures, memories, tables. Has what it has just computed spoiled any?

Such a tensor is finite when a step begins, is written in it, and is read in a later one, when nobody knows any more what
was written. Which lines leave such state is learned: what they make outlives its step. From then on it is looked at before
weights change. What a module's call binds anew or writes to beside the module is known from its other calls (see
`root_calls`). Whether it is a failure shows when something reads it: until then nothing is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import TypeAlias

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.events.log import EventLog
from ampguard.capture.events.operands import held_by, leaves, refs_of
from ampguard.capture.flags import FiniteFlag, is_immediate
from ampguard.capture.frames import lines_met
from ampguard.capture.glue.schedule import TapeSchedule
from ampguard.capture.glue.taped_calls import TapedCall, WritingCall
from ampguard.capture.record import BackwardCall, BadResult, Event, GlueOp, Held, Line, Ref, RootCall, SavedAttribute
from ampguard.capture.steps import StepCounter
from ampguard.compat import version_of
from ampguard.numerics import all_finite_on_cpu, is_finite

FIRST_STEPS = 4
"""Steps at the beginning of a run after each of which it is seen what outlives them."""

LEARN_EVERY = 64
"""The same later, of two steps in a row, in the middle of so many."""

ASK_EVERY = 32
"""Steps after which it is asked again whether there is time for taping what writes state outside a step's own computation."""

LARGEST = 1 << 16
"""Elements up to which state is looked at."""

MOST = 256
"""Results that are looked at in one go."""

MOST_OF_A_LINE = 64
"""Tensors that are remembered of one line."""

MOST_VIEWS = 4
"""Of views of views that are written to, so many are followed to the whole."""

Place: TypeAlias = tuple[int, int]
"""A line of code: the code object's identity, and the line's number."""


_Made: TypeAlias = tuple[Tensor, list[Event]]
"""State, and what has made it: one event, or all that have written to it in parts."""


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
class _Leaving:
    """A line that leaves state."""

    code: CodeType
    """Its identity is no other's as long as it lives."""
    wholes: list[weakref.ref[Tensor]] = field(default_factory=list)
    """What it writes to in parts."""
    was_good: bool = False
    """Whether what it has left was ever seen to be finite: what is bad from the start is no news."""
    bad: list[weakref.ref[Tensor]] = field(default_factory=list)
    """What it has left since it was told of first, all of it bad."""


@dataclass(slots=True)
class _Asked:
    """What a device is asked about: whether all of it is finite; what lines have made, and what calls have bound to names."""

    flag: FiniteFlag
    made: list[_Made]
    bound: list[tuple[RootCall, SavedAttribute, Tensor]]
    step: int


class CarriedState:
    """Learns which lines outside modules leave tensors to later steps, and looks at what they make."""

    def __init__(self, log: EventLog, steps: StepCounter, report: Callable[[BadResult], None]) -> None:
        self._log = log
        self._steps = steps
        self._report = report
        self._lines: dict[Place, _Leaving] = {}
        self._left: list[_Left] = []
        """What the last step has left, if it was seen."""
        self.spoiled: list[tuple[RootCall, str, Tensor]] = []
        """What calls since the last backward pass have turned bad beside their modules, and what it is called."""
        self._bound_there: list[tuple[RootCall, SavedAttribute, Tensor]] = []
        """What calls have bound anew that lies on a device, which is yet to be asked."""
        self._asked: list[_Asked] = []
        self._bound: set[tuple[int, str]] = set()
        """Names that were known to stand for something bad."""
        self._met = 0
        """Lines that had been met when the last iteration ended: one that runs seldom is seen when it does."""
        self._seen = 0
        """The same, when anything was last looked at."""
        self.is_over = False
        """Whether as much was told as is looked into."""
        self._looked_until = 0
        self.fetched = 0
        """The first event behind the last batch that a loader gave."""
        self.is_behind_backward = False
        """Whether state is written between a backward pass and the optimizer's step, and that is taped."""
        self.is_between_steps = False
        """Whether it is written before the first module of a step, or behind the last update, and that is taped."""
        self._taped = 0, 0
        """Events of a step that were taped because of these."""

    @property
    def are_any(self) -> bool:
        """Whether any line is known to leave state, or a call has spoiled some."""
        return bool(self._lines or self.spoiled or self._bound_there) or lines_met() > self._seen

    def rest(self, keep: Iterable[Place]) -> None:
        """Nothing more is told: only what these lines leave is still followed."""
        self.is_over, kept = True, set(keep)
        self._lines = {place: leaving for place, leaving in self._lines.items() if place in kept}
        self._left, self._asked, self._bound_there = [], [], []
        self.is_between_steps &= bool(self._lines)
        self.is_behind_backward &= bool(self._lines)

    def left_bad_by(self, lines: Iterable[Place]) -> Iterator[Tensor]:
        """The bad tensors that these lines have left lately."""
        for place in lines:
            leaving = self._lines.get(place)
            for ref in leaving.bad if leaving is not None else ():
                if (tensor := ref()) is not None:
                    yield tensor

    # --- which lines leave state --------------------------------------------------------------------------------------

    def iteration_ends(self, first_root: int, schedule: TapeSchedule, usual_seconds: float) -> None:
        """See what the step that ends has left. `first_root`: its first call of a module; `usual_seconds`: what steps take."""
        step = self._steps.count - 1
        if step % ASK_EVERY == ASK_EVERY - 1 and (self.is_behind_backward or self.is_between_steps):
            before, behind = self._taped
            self.is_between_steps &= schedule.may_tape_state(before, ASK_EVERY, usual_seconds)
            self.is_behind_backward &= schedule.may_tape_state(behind, ASK_EVERY, usual_seconds)
        if self.is_over:
            return
        if self._left:
            read = self._read_of_earlier_steps()
            for left in self._left:
                if left.ref() is not None or left.index in read:  # it has outlived a further step, or that has read it
                    self._leaves(left)
            self._left = []
        met, self._met = self._met, lines_met()
        if step < FIRST_STEPS or step % LEARN_EVERY - LEARN_EVERY // 2 in (0, 1) or self._met > met:
            self._left = list(self._left_by(first_root))

    def step_begins(self) -> None:
        """The first module of a step is called."""
        if any(left.is_between_steps for left in self._left):
            read, given = self._read_before_first_module()
            for left in self._left:  # (alive it may be as a variable of the script's that is not bound anew yet)
                if left.is_between_steps and (left.index in read or id(left.ref()) in given):
                    self._leaves(left)
        if self._lines or lines_met() > self._seen:
            self.look(is_between_steps=True)

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
        leaving = self._lines.setdefault(place_of(left.line), _Leaving(left.line.code))
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
        held = self._written(event)
        return held.tensor if held is not None and isinstance(event.args[0], Ref) else None

    def _written(self, event: GlueOp) -> Held | None:
        """What an operator has written to, if that was there before; also through views."""
        operand = event.args[0] if event.args and is_write(event) else None
        for _ in range(MOST_VIEWS):
            if not isinstance(operand, Ref):
                break
            maker = self._log.record.event(operand.event)
            operand = maker.args[0] if isinstance(maker, GlueOp) and maker.args else None
        return operand if isinstance(operand, Held) else None

    # --- what calls have left ------------------------------------------------------------------------------------------

    def called(self, root: RootCall) -> None:
        """A module's call has bound these names anew (attributes of objects, entries of dictionaries, globals)."""
        for place in root.attributes if not self.is_over else ():
            now = place.owner.get(place.name)
            if type(now) is not Tensor or not may_be_state(now):
                continue
            if is_immediate(now):
                self._note_bound(root, place, now, is_finite(now))
            elif len(self._bound_there) < MOST_OF_A_LINE:
                self._bound_there.append((root, place, now))

    def _note_bound(self, root: RootCall, place: SavedAttribute, now: Tensor, is_good: bool) -> None:
        key = id(place.owner), place.name
        if is_good:
            self._bound.discard(key)
        elif key not in self._bound:
            self._bound.add(key)
            before = place.value
            if not isinstance(before, Tensor) or is_finite(before.detach()):
                self.spoiled.append((root, place.name, now))

    def _tell_spoiled(self, step: int) -> None:
        spoiled, self.spoiled = self.spoiled, []
        root = spoiled[0][0]
        mine = [(name, tensor) for by, name, tensor in spoiled if by is root]
        held = tuple(Held(tensor, version_of(tensor)) for _, tensor in mine)
        names = tuple(name for name, _ in mine)
        self._report(BadResult("buffer", "train", step, self._log.slice(), held, names=names, is_of_state=True))

    # --- what lines have left -----------------------------------------------------------------------------------------

    def look(self, is_between_steps: bool = False, asks_device: bool = True) -> None:
        """Look at what such lines and calls have made since the last time. `asks_device`: a device is asked about what lies
        there, behind what is in its queue; see `read`."""
        if self.spoiled:
            self._tell_spoiled(self._steps.count)
        made = self._made_lately() if self._lines or lines_met() > self._seen else []
        here = [each for each in made if is_immediate(each[0])]
        if here:
            self._judge(here, self._step_of(here[0][1][0], is_between_steps))
        bound, self._bound_there = self._bound_there, []
        if asks_device and (bound or len(here) < len(made)) and not compat.cuda_is_capturing():
            there = [each for each in made if not is_immediate(each[0])]
            flag = FiniteFlag([*(tensor for tensor, _ in there), *(tensor for _, _, tensor in bound)])
            step = self._step_of(there[0][1][0], is_between_steps) if there else self._steps.count
            self._asked.append(_Asked(flag, there, bound, step))

    def read(self, wait: bool) -> None:
        """What a device has found, before weights change. It was asked before the backward pass: waiting leaves it busy."""
        while self._asked and (wait or self._asked[0].flag.is_known):
            each = self._asked.pop(0)
            is_good = each.flag.is_set()
            for root, place, tensor in each.bound:
                self._note_bound(root, place, tensor, is_good or is_finite(tensor))
            if self.spoiled:
                self._tell_spoiled(each.step)
            if each.made:
                self._judge(each.made, each.step, is_good)

    @property
    def has_asked(self) -> bool:
        """Whether a device has been asked and not been heard."""
        return bool(self._asked)

    def _made_lately(self) -> list[_Made]:
        """The state that lines have made since the last time, and by which events."""
        events = self._log.latest(self._looked_until)
        self._looked_until = self._log.next_index
        made: dict[int, _Made] = {}
        if lines_met() > self._seen and self._steps.count >= FIRST_STEPS:
            self._leave_nan(events)
        self._seen = lines_met()
        for event in events:
            leaving = self._lines.get(place_of(event.line)) if event.line is not None else None
            if leaving is None or not isinstance(event, GlueOp):
                continue
            wholes = [whole for ref in leaving.wholes if (whole := ref()) is not None]
            memory = {compat.storage_key(whole) for whole in wholes}
            for ref in event.outputs:
                tensor = ref()
                if tensor is not None and may_be_state(tensor) and compat.storage_key(tensor) not in memory:
                    made[id(tensor)] = tensor, [event]
            for whole in wholes if is_write(event) else ():  # a part that was read before shows what was written since
                made.setdefault(id(whole), (whole, []))[1].append(event)
        return list(made.values())[-MOST:]

    def _leave_nan(self, events: list[Event]) -> None:
        """Of lines that run seldom and were met for the first time just now, those that have made NaN may leave it to later
        steps: nobody has seen them leave anything yet. (An infinity would be a mask, or a number to begin with.)"""
        for event in events:
            line = event.line
            if (
                line is None
                or line.since <= self._seen
                or place_of(line) in self._lines
                or not isinstance(event, GlueOp)
            ):
                continue
            live = (ref() for ref in event.outputs)
            if any(t is not None and may_be_state(t) and is_immediate(t) and bool(t.isnan().any()) for t in live):
                self._lines[place_of(line)] = _Leaving(line.code, was_good=True)

    def _step_of(self, event: Event, is_between_steps: bool) -> int:
        """Before the first module of a step, what was computed before a loader gave its batch is the last step's."""
        is_of_last = is_between_steps and self._log.iteration_start <= event.index < self.fetched
        return self._steps.count - (is_of_last and self._steps.count > 0)

    def _judge(self, made: list[_Made], step: int, are_good: bool | None = None) -> None:
        """`are_good`: whether all are finite, where that is known."""
        lines = {place: self._lines[place] for _, events in made if (place := place_of(events[0].line)) in self._lines}
        if are_good is None:
            are_good = all_finite_on_cpu(tensor for tensor, _ in made)
        if are_good and not any(leaving.bad for leaving in lines.values()):
            for leaving in lines.values():
                leaving.was_good = True
            return
        good = set(lines)
        news: list[_Made] = []
        for tensor, events in made:
            place = place_of(events[0].line)
            if place not in lines or is_finite(tensor):
                continue
            good.discard(place)
            known = lines[place].bad
            if not known:
                news.append((tensor, events))
            elif all(ref() is not tensor for ref in known):
                lines[place].bad = [*(ref for ref in known if ref() is not None), weakref.ref(tensor)][-MOST_OF_A_LINE:]
        for place in good:
            lines[place].was_good = True
            lines[place].bad.clear()
        fresh = [(t, e) for t, e in news if lines[place_of(e[0].line)].was_good and self._was_finite(e[0].index)]
        for tensor, events in news:
            lines[place_of(events[0].line)].bad.append(weakref.ref(tensor))
        if fresh and not self.is_over:
            targets = tuple(dict.fromkeys(ref for tensor, events in fresh for ref in self._names_of(tensor, events)))
            self._report(BadResult("loss", "train", step, self._log.slice(), targets, is_of_state=True))

    def _names_of(self, tensor: Tensor, events: list[Event]) -> list[Ref]:
        """A result as the record names it; of what was written to in parts, each of the writes."""
        made_by = self._log.lookup(tensor) if len(events) == 1 and not is_write(events[0]) else None
        return [made_by] if made_by is not None else [Ref(event.index, 0) for event in events]

    def _was_finite(self, index: int) -> bool:
        """Whether what an operator wrote to was finite before, if it wrote to anything that it was given."""
        event = self._log.record.event(index)
        written = self._written(event) if isinstance(event, GlueOp) else None
        return written is None or not written.is_intact or is_finite(written.value.detach())


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
