"""State that a script keeps beside its modules: running figures, memories, tables. Has what it has just computed spoiled any?

Such a tensor is finite when a step begins, is written in it, and is read in a later one, when nobody knows any more what
was written. Which lines leave such state is learned (see `leaving_lines`); from then on what they make is looked at before
weights change. What a module's call binds anew or writes to beside the module is known from its other calls (see
`root_calls`). Whether it is a failure shows when something reads it: until then nothing is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from ampguard import compat
from ampguard.capture.events.log import EventLog
from ampguard.capture.flags import FiniteFlag, is_immediate
from ampguard.capture.frames import lines_met
from ampguard.capture.glue.schedule import TapeSchedule
from ampguard.capture.judging.leaving_lines import (
    FIRST_STEPS,
    MOST_OF_A_LINE,
    LeavingLines,
    Place,
    is_write,
    may_be_state,
    place_of,
)
from ampguard.capture.record import BadResult, Event, GlueOp, Held, Ref, RootCall, SavedAttribute
from ampguard.capture.steps import StepCounter
from ampguard.compat import version_of
from ampguard.numerics import all_finite_on_cpu, is_finite

MOST = 256
"""Results that are looked at in one go."""

_Made: TypeAlias = tuple[Tensor, list[Event]]
"""State, and what has made it: one event, or all that have written to it in parts."""


@dataclass(slots=True)
class _Asked:
    """What a device is asked about: whether all of it is finite; what lines have made, and what calls have bound to names."""

    flag: FiniteFlag
    made: list[_Made]
    bound: list[tuple[RootCall, SavedAttribute, Tensor]]
    step: int


class CarriedState:
    """Looks at what lines outside modules, and calls, leave to later steps."""

    def __init__(self, log: EventLog, steps: StepCounter, report: Callable[[BadResult], None]) -> None:
        self._log = log
        self._steps = steps
        self._report = report
        self.leaving = LeavingLines(log, steps)
        self.spoiled: list[tuple[RootCall, str, Tensor]] = []
        """What calls since the last backward pass have turned bad beside their modules, and what it is called."""
        self._bound_there: list[tuple[RootCall, SavedAttribute, Tensor]] = []
        """What calls have bound anew that lies on a device, which is yet to be asked."""
        self._asked: list[_Asked] = []
        self._bound: set[tuple[int, str]] = set()
        """Names that were known to stand for something bad."""
        self._seen = 0
        """Lines that had been met when anything was last looked at."""
        self.is_over = False
        """Whether as much was told as is looked into."""
        self._looked_until = 0
        self.fetched = 0
        """The first event behind the last batch that a loader gave."""

    @property
    def are_any(self) -> bool:
        """Whether any line is known to leave state, or a call has spoiled some."""
        return bool(self.leaving.lines or self.spoiled or self._bound_there) or lines_met() > self._seen

    def rest(self, keep: Iterable[Place]) -> None:
        """Nothing more is told: only what these lines leave is still followed."""
        self.is_over = True
        self.leaving.rest(keep)
        self._asked, self._bound_there = [], []

    def left_bad_by(self, lines: Iterable[Place]) -> Iterator[Tensor]:
        """The bad tensors that these lines have left lately."""
        for place in lines:
            leaving = self.leaving.lines.get(place)
            for ref in leaving.bad if leaving is not None else ():
                if (tensor := ref()) is not None:
                    yield tensor

    def iteration_ends(self, first_root: int, schedule: TapeSchedule, usual_seconds: float) -> None:
        """See what the step that ends has left. `first_root`: its first call of a module; `usual_seconds`: what steps take."""
        self.leaving.taped(schedule, usual_seconds)
        if not self.is_over:
            self.leaving.iteration_ends(first_root)

    def step_begins(self) -> None:
        """The first module of a step is called."""
        self.leaving.step_begins()
        if self.leaving.lines or lines_met() > self._seen:
            self.look(is_between_steps=True)

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
        made = self._made_lately() if self.leaving.lines or lines_met() > self._seen else []
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
            self.leaving.leave_nan(events, self._seen)
        self._seen = lines_met()
        for event in events:
            leaving = self.leaving.lines.get(place_of(event.line)) if event.line is not None else None
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

    def _step_of(self, event: Event, is_between_steps: bool) -> int:
        """Before the first module of a step, what was computed before a loader gave its batch is the last step's."""
        is_of_last = is_between_steps and self._log.iteration_start <= event.index < self.fetched
        return self._steps.count - (is_of_last and self._steps.count > 0)

    def _judge(self, made: list[_Made], step: int, are_good: bool | None = None) -> None:
        """`are_good`: whether all are finite, where that is known."""
        lines = {
            place: self.leaving.lines[place]
            for _, events in made
            if (place := place_of(events[0].line)) in self.leaving.lines
        }
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
        written = self.leaving.written_by(event) if isinstance(event, GlueOp) else None
        return written is None or not written.is_intact or is_finite(written.value.detach())
