"""CUDA graphs: while one is captured the guard is silent, and what a replay does is counted to the running step.

During a capture nothing runs on the device, and nothing may be asked of it: `.item()`, an event, pinned memory or the
state of a random generator ends the capture with an error. So from the beginning to the end of each capture, in every
thread, no probe is told of anything (`recorder.active`) and no barrier lets anything of ours run. Noted is only what
Python did: which loss was differentiated, which optimizers stepped.

A replay runs no Python, but it leaves a loss and gradients that may be bad. What it ran is not known; the pass that the
script made right before the capture, to warm up, mostly is the same: from its record, and what the graph's static
inputs hold now, the replayed pass can be run again.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard.capture.barrier import captures_underway
from ampguard.capture.events.log import EventLog
from ampguard.capture.events.operands import held_in, refs_in
from ampguard.capture.frames import user_line
from ampguard.capture.glue.told import tell_calls
from ampguard.capture.record import BackwardCall, BadResult, Event, GlueOp, Held, Line, Ref, RootCall, StepRecord
from ampguard.capture.root_calls.trees import named_tuple
from ampguard.compat import cuda_is_capturing as is_capturing
from ampguard.compat import cuda_is_in_use, version_of

if TYPE_CHECKING:
    from ampguard.capture.recorder import FlightRecorder

_GONE: weakref.ref[Tensor] = weakref.ref(torch.empty(0))
"""Of a result that nobody has held on to."""

WARM_UP = 16
"""Iterations at most that are made before a capture; `DistributedDataParallel` wants 11."""


class CapturedGraph:
    """What is known of a graph."""

    def __init__(self, before: StepRecord, line: Line | None) -> None:
        self.line = line
        """Where its capture began."""
        self.passes = 0
        """Backward passes in it."""
        self.losses: list[weakref.ref[Tensor]] = []
        """What they differentiate, without a scaler's factor. A loss that nobody holds has no memory of its own."""
        self.optimizers: list[weakref.ref[Optimizer]] = []
        """Those that step in it, as often as they do: the weights are then no longer those that its passes began with."""
        self._before = before
        """What the script has computed right before."""
        self._events: list[Event] = []
        """A pass like the captured one; none where none is known."""
        self._loss: Ref | None = None
        self._held: list[Tensor] = []
        """What that pass was given."""

    def captured(self, is_scaled: bool) -> None:
        """The capture has ended."""
        before, self._before = self._before, StepRecord()
        if not self.passes:
            return
        self._events, self._loss = _last_passes(before, self.passes, is_scaled)
        self._held = [held.tensor for event in self._events for held in held_in((event.args, event.kwargs))]

    def replayed(self, attempts: int) -> GraphReplay:
        """It is replayed, after so many steps of optimizers."""
        return GraphReplay(self, {id(tensor): version_of(tensor) for tensor in self._held}, attempts)

    def with_record(self, bad: BadResult, log: EventLog, versions: dict[int, int], attempts: int) -> BadResult:
        """The bad result, with the record of what a replay must have computed; an empty one where that is not known.

        Its events get numbers of their own: another replay is another step. `versions`: of what it was given, by identity.
        """
        if not self._events:
            return dataclasses.replace(bad, record=StepRecord(), targets=())
        first, last = self._events[0].index, self._events[-1].index
        shift = log.next_index - first
        log.next_index += last + 1 - first
        log.set_aside += last + 1 - first
        events: list[Event] = []
        for event in self._events:
            given = _mapped(
                (event.args, event.kwargs),
                lambda held: Held(held.tensor, versions.get(id(held.tensor), -1)),
                lambda ref: Ref(ref.event + shift, ref.output),
            )
            changed: dict[str, Any] = {"index": event.index + shift, "args": given[0]}
            if not isinstance(event, BackwardCall):
                changed["kwargs"] = given[1]
            if not isinstance(event, GlueOp):
                changed["updates_before"] = attempts
            events.append(dataclasses.replace(event, **changed))
        targets: tuple[Ref, ...] = ()
        if bad.kind == "loss" and self._loss is not None:
            targets = (Ref(self._loss.event + shift, self._loss.output),)
        record = StepRecord(events, iteration_start=events[0].index)
        return dataclasses.replace(bad, record=record, targets=targets, since=0)


@dataclasses.dataclass(frozen=True, slots=True)
class GraphReplay:
    """One replay of a graph. `versions`: of the graph's static inputs, by identity; `attempts`: optimizers' steps before it."""

    graph: CapturedGraph
    versions: dict[int, int]
    attempts: int

    @property
    def line(self) -> Line | None:
        """Where the graph's capture began."""
        return self.graph.line

    @property
    def changes_weights(self) -> bool:
        """Whether it leaves other weights than it began with."""
        return bool(self.graph.optimizers)

    def with_record(self, bad: BadResult, log: EventLog) -> BadResult:
        """A bad result of this replay, with the record of what it must have computed."""
        return self.graph.with_record(dataclasses.replace(bad, graph=self), log, self.versions, self.attempts)


class GraphCaptures:
    """The CUDA graphs of one recorder."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._silenced: dict[int, CapturedGraph] = {}
        """Those that are being captured; with them, calls that capture some by themselves."""
        self._known: weakref.WeakKeyDictionary[Any, CapturedGraph] = weakref.WeakKeyDictionary()
        self._is_unseen = False
        self._scaled: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        """Losses that are scaled in the capture that is underway."""
        self.iteration: StepRecord | None = None
        """The last one, as long as it may turn out to have been a warm-up; until the next one begins."""
        self.last: GraphReplay | None = None
        """The replay that has differentiated last, if nothing else has since."""
        self.before_silence: list[Callable[[], None]] = []
        """Who wants to close something, or let it go, before a capture begins."""
        self.on_scaler: Callable[[Any], None] = lambda scaler: None
        """Told of a scaler that has scaled a loss in a capture."""
        self.on_training: Callable[[], None] = lambda: None
        """Told of each replay that differentiates or changes weights: of its gradients nothing is known."""

    def iteration_ends(self) -> None:
        """An iteration is about to end: as one of the first it may be a warm-up, and the next thing a capture."""
        recorder = self._recorder
        if recorder.steps.count <= WARM_UP and cuda_is_in_use() and not recorder.counting:
            self.iteration = recorder.log.snapshot()

    # --- the capture ------------------------------------------------------------------------------------------------

    def begin(self, graph: Any, is_one: bool = True) -> None:
        """A capture begins: from here on the guard is silent. `is_one`: not a call that captures some by itself."""
        recorder = self._recorder
        if not (recorder.active or self._silenced):
            return
        before, line = StepRecord(), None
        if not (self._silenced or recorder.paused or recorder.turns.thread != threading.get_ident()):
            recorder.barrier.call(self._before_silence)
            recorder.barrier.call(
                recorder.judge.read_flags, True, True
            )  # `torch.cuda.graph` has waited for the device already
            before = (recorder.barrier.call(self._step_before) if is_one else None) or before
            line = recorder.barrier.call(user_line, sys._getframe(2))
            recorder.barrier.call(self._let_go)
        self._silenced[id(graph)] = CapturedGraph(before, line)
        captures_underway.add(id(graph))
        recorder.active = False

    def begin_unseen(self) -> None:
        """A capture is underway that was not begun by Python, or before the guard was on. Nobody will tell of its end."""
        self._recorder.barrier.call(self._before_silence)
        self._is_unseen = True
        self._silenced[id(self)] = CapturedGraph(StepRecord(), None)
        captures_underway.add(id(self))
        self._recorder.active = False

    def _may_be_over(self) -> None:
        if self._is_unseen and not is_capturing():
            self._is_unseen = False
            self.end(self, is_captured=False)

    def _before_silence(self) -> None:
        """Nothing here asks a device for anything: perhaps the capture is underway."""
        for close in self.before_silence:
            close()
        recorder = self._recorder
        recorder.tape.leave()
        if recorder.before_training.is_on:
            recorder.before_training.end()

    def _let_go(self) -> None:
        """Hold on to nothing that was differentiated: autograd adds gradients up on the stream of the first pass that is
        still there, and a capture may not depend on another stream."""
        self.iteration = None
        self._recorder.log.clear()

    def _step_before(self) -> StepRecord:
        recorder = self._recorder
        if recorder.counting:
            return StepRecord()
        if self.iteration is None:
            return recorder.log.slice()
        before, self.iteration = self.iteration, None
        tell_calls(before)
        return before

    def end(self, graph: Any, is_captured: bool) -> None:
        """It has ended; with the last one, the silence."""
        captured = self._silenced.pop(id(graph), None)
        if captured is None:
            return
        captures_underway.discard(id(graph))
        if self._silenced and is_captured:  # one of several that a call has captured: autograd tells of what they do
            self._known[graph] = CapturedGraph(StepRecord(), None)
        if not self._silenced:
            recorder = self._recorder
            is_scaled, self._scaled = bool(self._scaled), {}
            recorder.active = not recorder.barrier.tripped
            recorder.barrier.call(self.on_training)  # gradients were cleared for it, or made; other threads went unseen
            if is_captured:
                recorder.barrier.call(captured.captured, is_scaled)
                self._known[graph] = captured
                if is_scaled:
                    recorder.barrier.call(self.on_scaler, recorder.scaling.scaler)

    def give_up(self) -> None:
        """The guard is taken out, perhaps in the middle of a capture."""
        captures_underway.difference_update(self._silenced)
        self._silenced.clear()

    # --- what Python does in it, noted past the barrier: nothing here asks a tensor for a value ---------------------

    def scaled(self, loss: Any, scaled: Any, scaler: Any) -> None:
        """A scaler has scaled a loss."""
        if self._silenced and isinstance(loss, Tensor) and isinstance(scaled, Tensor):
            self._recorder.scaling.scaler = scaler
            self._scaled[id(scaled)] = (weakref.ref(scaled), loss)

    def differentiates(self, losses: Any) -> None:
        """Something is differentiated."""
        self._may_be_over()
        for captured in self._silenced.values():
            captured.passes += 1
            for loss in losses if isinstance(losses, (tuple, list)) else (losses,):
                known = self._scaled.get(id(loss))
                loss = known[1] if known is not None and known[0]() is loss else loss
                if isinstance(loss, Tensor) and loss.numel() == 1:
                    captured.losses.append(weakref.ref(loss))

    def steps(self, optimizer: Optimizer) -> None:
        """An optimizer steps."""
        self._may_be_over()
        for captured in self._silenced.values():
            captured.optimizers.append(weakref.ref(optimizer))

    # --- replays ----------------------------------------------------------------------------------------------------

    def before_replay(self, graph: Any) -> None:
        """The script is about to replay a graph."""
        known = self._known.get(graph)
        if known is not None and known.passes:
            self._recorder.listener.on_forward()

    def after_replay(self, graph: Any) -> None:
        """It has."""
        recorder, known = self._recorder, self._known.get(graph)
        if known is None or known.passes or known.optimizers:
            self.on_training()
        if known is None:
            return
        if known.passes:
            self.last = known.replayed(recorder.steps.attempts)
            recorder.turns.differentiates()
            losses = [loss for ref in known.losses if (loss := ref()) is not None]
            recorder.paused = True  # the tape is not to take our look for the script's doing
            try:
                recorder.judge.judge_replayed(losses, self.last)
            finally:
                recorder.paused = False
            recorder.gradients.replayed()
        for ref in known.optimizers:
            optimizer = ref()
            if optimizer is not None:
                recorder.updated_in_graph(optimizer)
        if known.passes and not known.optimizers:
            recorder.differentiated_in_graph(known.line)

    def behind(self, bad: BadResult) -> BadResult:
        """Bad gradients, with what is known of the graph that made them, if one has."""
        return bad if self.last is None else self.last.with_record(bad, self._recorder.log)


def _last_passes(record: StepRecord, passes: int, is_scaled: bool) -> tuple[list[Event], Ref | None]:
    """So many of the last backward passes of a record, what led to them, and the loss of the last one.

    What they were given from before is held: the graph's static inputs. Nothing where that is gone, or cannot be told.
    """
    calls = [i for i, event in enumerate(record.events) if isinstance(event, BackwardCall)]
    if len(calls) < passes:
        return [], None
    first = calls[-passes - 1] + 1 if len(calls) > passes else 0
    events = record.events[first : calls[-1] + 1]
    roots = [position for position, event in enumerate(events) if isinstance(event, RootCall)]
    if not roots:
        return [], None
    events = events[roots[0] :]
    within = {event.index for event in events}
    known: dict[Ref, Held | None] = {}
    for event in events:
        for ref in refs_in((event.args, event.kwargs)):
            if ref.event not in within and ref not in known:
                tensor = record.tensor_behind(ref)
                known[ref] = None if tensor is None else Held(tensor, version_of(tensor))
        if isinstance(event, RootCall) and event.swapped_state:
            return [], None
    if any(held is None for held in known.values()):
        return [], None
    copies = [_copied(event, known) for event in events]
    return copies, _loss_of(copies, is_scaled)


def _copied(event: Event, known: dict[Ref, Held | None]) -> Event:
    args, kwargs = _mapped((event.args, event.kwargs), lambda held: held, lambda ref: known.get(ref, ref))
    nothing = [_GONE for _ in event.outputs]
    if isinstance(event, RootCall):
        return dataclasses.replace(event, args=args, kwargs=kwargs, buffers=[], attributes=[], outputs=nothing)
    if isinstance(event, BackwardCall):
        return dataclasses.replace(event, args=args, outputs=nothing)
    return dataclasses.replace(event, args=args, kwargs=kwargs, outputs=nothing)


def _loss_of(events: list[Event], is_scaled: bool) -> Ref | None:
    """What the last of these passes differentiates, without the factor of a scaler."""
    last = events[-1]
    losses = refs_in(last.args[0]) if isinstance(last, BackwardCall) else []
    if not losses:
        return None
    made = next((event for event in events if event.index == losses[0].event), None)
    is_product = isinstance(made, GlueOp) and made.func is torch.ops.aten.mul.Tensor
    if is_scaled and is_product and isinstance(made.args[0], Ref):  # type: ignore[union-attr]
        return made.args[0]  # type: ignore[union-attr]
    return losses[0]


def _mapped(tree: Any, held: Callable[[Held], Any], made: Callable[[Ref], Any]) -> Any:
    """A copy of a tree of arguments, with other names in it for what is held and for what events made."""
    if isinstance(tree, Held):
        return held(tree)
    if isinstance(tree, Ref):
        return made(tree)
    if isinstance(tree, dict):
        return {key: _mapped(value, held, made) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [_mapped(value, held, made) for value in tree]
        if isinstance(tree, list):
            return items
        return named_tuple(type(tree), items) if hasattr(tree, "_make") else tuple(items)
    return tree
