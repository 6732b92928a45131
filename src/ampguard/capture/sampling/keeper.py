"""Keeping a stretch of steps while a run seems to go wrong.

Nothing is kept while the alarm is quiet. When it is raised, before an update, or where one of the first updates is large
against the weights themselves, the trained parameters and the optimizers are copied; from there on the records of the steps
are held, with what each update was made of. At most `SEGMENTS` times `SEGMENT_STEPS` steps: beyond it the oldest part goes,
and the copies with it, unless what is kept shows already how the loss rises. When the alarm has passed, all of it goes.

Memory: the copies and the inputs that the records hold on to may take up `MEMORY_SHARE` of what the device and the host
have left. Where that is not enough, `refusal` says so and nothing is kept.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.events.cutting import cut_before
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.sampling.copies import parameters_of, size_of, take_snapshot
from ampguard.capture.sampling.memory import available_bytes
from ampguard.capture.sampling.rates import rate_of
from ampguard.capture.sampling.stretch import (
    KeptStep,
    Segment,
    Stretch,
    Update,
    find_target,
    has_risen,
    needed_events,
    secure,
    why_not,
)
from ampguard.capture.sampling.update_size import gradient_norm, relative_size
from ampguard.compat import cuda_is_capturing as is_capturing

SEGMENT_STEPS = 16
SEGMENTS = 2
MEMORY_SHARE = 1 / 8
CALM_STEPS = 8
"""Quiet steps in a row after which the alarm has passed."""
CALM_STEPS_AT_A_NEW_RATE = SEGMENTS * SEGMENT_STEPS
"""The same after a much larger learning rate: with momentum and few steep directions it takes its time."""
LONGEST_ALARM = 256
"""Steps after which what raised the alarm is taken to be the usual."""
TIME_SHARE = 0.01
"""Of the run's time that copying for alarms may take; the first copy is free, and those before first updates are."""
FIRST_UPDATES = 3
"""Updates of an optimizer whose size is asked for beforehand: what a rate far too large does, it does at once."""
LARGE_UPDATE = 0.1
"""Of the weights' norm. Ordinary first updates move weights by some hundredths or less."""
FREE_SECONDS = 2.0
"""Beyond it, keeping steps may take the same share of the time: some losses jump up and down for ever."""


class Alarm(Protocol):
    """Knows the range of one optimizer's losses and learning rates."""

    highest: float
    rate: float

    def is_quiet(self, loss: float | None, rate: float) -> bool: ...
    def reason(self, loss: float | None, rate: float) -> str: ...
    def calm(self, loss: float | None, rate: float) -> None: ...
    def settle(self) -> None: ...


@dataclass(slots=True)
class _Known:
    """An optimizer, its alarm, the thread that steps it, and how often that has happened."""

    ref: weakref.ref[Optimizer]
    alarm: Alarm
    thread: int
    updates: int = 0


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Why steps are to be kept, whose alarm it is and the largest rate that it bore.

    `first_update`: see `Stretch`. `calm_steps`: quiet steps after which the alarm has passed.
    """

    reason: str
    alarm: Alarm
    rate: float
    first_update: float | None = None
    calm_steps: int = CALM_STEPS


class StretchKeeper:
    """Listens to the alarm before each update, and keeps steps while it is raised."""

    def __init__(self, recorder: FlightRecorder, new_alarm: Callable[[], Alarm]) -> None:
        self.stretch: Stretch | None = None
        self.alarms_raised = 0
        self.limit: Callable[[Sequence[Tensor]], int | None] = available_bytes
        """Bytes left for tensors like these; None where it is not known."""
        self._recorder = recorder
        self._new_alarm = new_alarm
        self._known: dict[int, _Known] = {}
        """The optimizers that have stepped, by identity."""
        self._losses_seen = 0
        self._begin = 0
        """The first event of the running iteration."""
        self._has_updated = False
        self.is_late = False
        """Whether losses lie on a device."""
        self._wanted: _Wanted | None = None
        """Raised after the iteration's first update: a snapshot is due before the next one's."""
        self._raised_by: Alarm | None = None
        self._calm_steps = CALM_STEPS
        self._updates: list[Update] = []
        self.turns: list[tuple[weakref.ref[Optimizer], float]] = []
        """Of the running iteration, where several optimizers step: whose update came after which loss."""
        self._is_scaled = False
        """Whether the last update was made by a scaler."""
        self._step = 0
        self._quiet_steps = 0
        self._is_quiet = True
        self._steps_armed = 0
        self._spent = 0.0
        self._cost = 0.0
        self._kept_for = 0.0
        """Seconds that keeping steps has taken."""
        self._began = time.perf_counter()

    def before_update(self, optimizer: Optimizer, by_scaler: bool) -> None:
        """An optimizer is about to step. Costs two or three microseconds where nothing is kept."""
        losses = self._recorder.judge.losses
        seen, self._losses_seen = self._losses_seen, len(losses)
        loss = losses[seen] if len(losses) == seen + 1 else _sum(losses[seen:])
        known = self._known.get(id(optimizer))
        if known is None or known.ref() is not optimizer:
            known = self._known[id(optimizer)] = _Known(weakref.ref(optimizer), self._new_alarm(), 0)
        known.thread = get_ident()
        known.updates += 1
        alarm = known.alarm
        rate = optimizer.param_groups[0].get("lr", 0.0)
        value = loss if type(loss) is float else None
        self.is_late = isinstance(loss, Tensor)
        if value is not None and (len(self._known) > 1 or known.updates == 1):
            self.turns.append((known.ref, value))
        rate = rate if type(rate) is float else 0.0 if isinstance(rate, Tensor) else rate_of(rate)
        if alarm.is_quiet(value, rate):
            if known.updates <= FIRST_UPDATES and self.stretch is None and self._wanted is None:
                self._ask_how_large(optimizer, alarm, rate, by_scaler)
            if self.stretch is None or self.stretch.first_update is not None:
                alarm.calm(value, rate)
        else:
            self._is_quiet = False
            if self.stretch is None and (self._wanted is None or self._wanted.first_update):
                calm_steps = CALM_STEPS if alarm.is_quiet(None, rate) else CALM_STEPS_AT_A_NEW_RATE
                self._wanted = _Wanted(alarm.reason(value, rate), alarm, alarm.rate, calm_steps=calm_steps)
            alarm.rate = max(alarm.rate, rate)  # it has been told once
        if self.stretch is not None or self._wanted is not None:
            self._attend(optimizer, by_scaler)
        self._has_updated = True

    def heard_later(self, loss: float | None) -> None:
        """The loss of an earlier step, whose device was not waited for, has come."""
        if not self.is_late or self.stretch is not None or loss is None:
            return
        if math.isfinite(loss) and len(self._known) == 1:
            alarm = next(iter(self._known.values())).alarm
            if alarm.is_quiet(loss, alarm.rate):
                alarm.calm(loss, alarm.rate)
            elif self._wanted is None or self._wanted.first_update:
                self._wanted = _Wanted(alarm.reason(loss, alarm.rate), alarm, alarm.rate)

    def iteration_ended(self, step: int) -> None:
        """Iteration number `step` is over; called before its losses are taken."""
        self._step = step + 1
        self._losses_seen = 0
        self._has_updated = False
        log = self._recorder.log
        begin, self._begin = max(self._begin, log.iteration_start), log.next_index
        updates, self._updates = self._updates, []
        quiet, self._is_quiet = self._is_quiet, True
        stretch = self.stretch
        if stretch is None:
            return
        if stretch.refusal is None and not stretch.is_closed:
            started = time.perf_counter()
            self._keep(stretch, self._kept(step, begin, updates))
            if stretch.first_update is None:
                self._kept_for += time.perf_counter() - started
        if any(type(loss) is float and not math.isfinite(loss) for loss in self._recorder.judge.losses):
            self._drop()  # it has failed: what led to it has been asked for
            return
        self._steps_armed += 1
        self._quiet_steps = self._quiet_steps + 1 if quiet else 0
        if self._steps_armed >= LONGEST_ALARM and self._raised_by is not None:
            self._raised_by.settle()
            self._drop()
        elif self._quiet_steps >= self._calm_steps:
            self._drop()

    def with_running_step(self) -> Stretch | None:
        """What is kept, and the step that has just failed as its last one."""
        stretch = self.stretch
        if stretch is None or stretch.refusal is not None or not stretch.segments:
            return stretch
        recorder = self._recorder
        begin = max(self._begin, recorder.log.iteration_start)
        step = self._kept(max(self._step, recorder.steps.count), begin, self._updates)
        find_target(step, recorder)
        if stretch.is_closed:
            stretch.failing = step
            return stretch
        whole = Stretch(stretch.reason, stretch.raised_at, stretch.highest, stretch.rate, stretch.first_update)
        whole.segments = deque(Segment(s.snapshot, list(s.steps)) for s in stretch.segments)
        whole.segments[-1].steps.append(step)
        whole.failing = step
        return whole

    # --- keeping ------------------------------------------------------------------------------------------------------

    def _attend(self, optimizer: Optimizer, by_scaler: bool) -> None:
        """The alarm is raised: copy what an iteration starts from, note what its updates are made of."""
        if is_capturing():
            return
        if not self._has_updated:
            if self._wanted is not None:
                self._raise_alarm(self._wanted)
            elif self.stretch is not None and self._is_segment_full(self.stretch):
                self.stretch.is_closed = has_risen(self.stretch.steps)
                if not self.stretch.is_closed:
                    self._copy(self.stretch)
        stretch = self.stretch
        if stretch is None or stretch.refusal is not None or stretch.is_closed or not stretch.segments:
            return
        number = stretch.segments[-1].snapshot.number_of(optimizer)
        if number is None:
            self._refuse(stretch, "an optimizer joined after the copy of the weights was made")
            return
        self._updates.append(self._noted(optimizer, number, by_scaler))

    def _ask_how_large(self, optimizer: Optimizer, alarm: Alarm, rate: float, by_scaler: bool) -> None:
        """Is this update, one of the first, about as large as the weights? Then it is kept from here on."""
        size = relative_size(optimizer, by_scaler, has_new_rate=rate > alarm.rate)
        if size is not None and size > LARGE_UPDATE:
            reason = f"at a learning rate of {rate:g} an update is {size:.2g} times as large as the weights"
            self._wanted = _Wanted(reason, alarm, rate, size)

    def _raise_alarm(self, wanted: _Wanted) -> None:
        self._wanted = None
        recorder = self._recorder
        elapsed = time.perf_counter() - self._began
        is_first = wanted.first_update is not None
        is_dear = not is_first and self._cost and self._spent + self._cost > TIME_SHARE * elapsed
        if recorder.counting or is_dear or self._kept_for > FREE_SECONDS + TIME_SHARE * elapsed:
            return
        self.alarms_raised += 1
        self.stretch = Stretch(
            wanted.reason, self._step, wanted.alarm.highest, wanted.rate, first_update=wanted.first_update
        )
        self._raised_by, self._calm_steps = wanted.alarm, wanted.calm_steps
        self._quiet_steps = self._steps_armed = 0
        self._copy(self.stretch)
        if not is_first:
            self._cost = time.perf_counter() - self._began - elapsed
            self._spent += self._cost

    def _copy(self, stretch: Stretch) -> None:
        """Copy the weights and the optimizers, if there is room; the oldest segment goes first."""
        while len(stretch.segments) >= SEGMENTS:
            stretch.segments.popleft()
        me, known = get_ident(), tuple(self._known.values())  # what another thread steps is changing just now
        optimizers = [o for one in known if one.thread == me and (o := one.ref()) is not None]
        if stretch.first_update is not None:
            optimizers += [o for o in self._recorder.steps.yet_to_step if all(o is not other for other in optimizers)]
        room = self._room(optimizers, stretch.size)
        size = size_of(optimizers)
        if room is not None and size + stretch.size > room:
            self._refuse(stretch, f"a copy of the weights and the optimizer's state takes {size / 1e6:.0f} MB, and "
                                  f"{room / 1e6:.0f} MB may be used for it")  # fmt: skip
            return
        snapshot = take_snapshot(optimizers)
        if isinstance(snapshot, str):
            self._refuse(stretch, snapshot)
            return
        stretch.segments.append(Segment(snapshot))

    def _room(self, optimizers: Sequence[Optimizer], held: int) -> int | None:
        """Bytes that may be held in all; None where it is not known what is left."""
        left = self.limit(parameters_of(optimizers))
        return None if left is None else int(MEMORY_SHARE * (left + held))

    def _keep(self, stretch: Stretch, step: KeptStep) -> None:
        if not stretch.segments:
            return
        step.record.events = needed_events(step.record)
        why = why_not(step.record, stretch.snapshot)
        if why is not None:
            self._refuse(stretch, why)
            return
        secure(step.record.events)
        stretch.segments[-1].keep(step)
        room = self._room(stretch.snapshot.live_optimizers(), stretch.size)
        if room is None or stretch.size <= room:
            return
        if len(stretch.segments) > 1:
            stretch.segments.popleft()
        if stretch.size > room:
            self._refuse(stretch, f"the inputs of these steps take more than the {room / 1e6:.0f} MB that may be used")

    def _kept(self, number: int, begin: int, updates: list[Update]) -> KeptStep:
        record = self._recorder.log.slice()
        record.events = cut_before(record.events, begin)
        record.iteration_start = begin
        return KeptStep(number, record, list(updates), list(self._recorder.judge.losses), self._scale_now())

    def _noted(self, optimizer: Optimizer, number: int, by_scaler: bool) -> Update:
        self._is_scaled = by_scaler
        norm = gradient_norm(optimizer, by_scaler)
        own = self._recorder.judge.last_scale
        options = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ]
        return Update(
            self._recorder.log.next_index,
            number,
            options,
            self._scale_now() or (own if own != 1.0 else None),
            float(norm) if norm is not None else None,
        )

    def _scale_now(self) -> float | None:
        """The loss scale, where a scaler makes the updates."""
        scale = (
            compat.loss_scale(self._recorder.scaling.scaler)
            if self._is_scaled and self._recorder.scaling.scaler
            else None
        )
        return float(scale) if scale is not None else None

    def _is_segment_full(self, stretch: Stretch) -> bool:
        is_open = bool(stretch.segments) and not stretch.is_closed
        return is_open and len(stretch.segments[-1].steps) >= SEGMENT_STEPS

    def _refuse(self, stretch: Stretch, why: str) -> None:
        stretch.refusal = why
        stretch.segments.clear()
        self._updates.clear()

    def _drop(self) -> None:
        self.stretch = None
        self._raised_by = None
        self._updates.clear()


def _sum(losses: list[float | Tensor]) -> float | None:
    if not losses or any(type(loss) is not float for loss in losses):
        return None
    return math.fsum(float(loss) for loss in losses)
