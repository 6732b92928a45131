"""Dropping what nobody asks for any more: events of finished steps, and of an evaluation that goes on."""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter

import torch

from ampguard.capture.events.cutting import cut_before
from ampguard.capture.events.forgetting import (
    KEPT_ROOTS,
    has_live_result,
    is_evaluating,
    still_used,
)
from ampguard.capture.events.kept_events import SWEEP_EVENTS, KeptEvents
from ampguard.capture.events.operands import refs_of
from ampguard.capture.events.producers import Producers
from ampguard.capture.glue.taped_calls import TapedCall, WritingCall
from ampguard.capture.glue.told import tell_calls
from ampguard.capture.record import BackwardCall, Event, RootCall, StepRecord, since

SETTLED_AT = 512
"""Events that may be pending when the next module is called."""

_CALLS = frozenset({TapedCall, WritingCall})


class ForgettingLog(KeptEvents):
    """The events of the current step, of which those are forgotten that are not in use."""

    def iteration_ended(self, is_all: bool = True) -> None:
        """Glue of a finished step is not kept: what its calls computed from is the script's alone again.

        `is_all`: what follows is computed from new weights, and not from those that were made of what is kept here.
        """
        ahead = self.ahead
        ahead.iteration_ended(self.iteration_start, self.record.events if ahead.is_usual or ahead.is_learning else ())
        self.iteration_start = self.next_index
        if self.evaluation.is_under_way or self.evaluation.made:
            self.evaluation.clear()
        if self.written.writes:
            self.written.writes.clear()
        if self._holders.have_seen:
            self._holders.clear()
        if not is_all:
            return
        record = self._record
        if self._pending.entries:
            for entry in self._pending.take():
                if type(entry[0]) is RootCall:
                    record.events.append(entry[0])
        if not _CALLS.isdisjoint(map(type, record.events)):
            kept = self.ahead.kept
            record.events = [event for event in record.events if type(event) not in _CALLS or event.index in kept]

    def slice(self) -> StepRecord:
        """The record as it stands, for an investigation."""
        tell_calls(self.record)
        self._holders.clear()
        return self.snapshot()

    def snapshot(self) -> StepRecord:
        """The record as it stands; its calls are yet to be told."""
        record = self.record
        return StepRecord(list(record.events), record.complete, dict(self.producers.writers), self.iteration_start)

    def clear(self) -> None:
        self._record = StepRecord()
        self._pending.clear()
        self.producers = Producers()
        self._holders.clear()

    def forget_finished(self, keep_all: bool, is_grad_enabled: bool) -> bool:
        """Drop the events before the last backward, and dead ones of a loop that never differentiates.

        Kept are events whose results are still in use (a GAN's fake image, an output of which a second loss is made),
        and those of an iteration whose optimizer has not stepped yet: its gradients are still to be judged.
        `keep_all`: something else is. True where events of a finished backward were dropped.
        """
        events = self._record.events
        if self.arguments.waiting:
            self.arguments.look()
        first = events[0] if events else self._pending.entries[0][0] if self._pending.entries else None
        has_closed = first is not None and first.index < self.closed_until
        is_looked_through = has_closed and self._forgot[0] == self.closed_until
        if is_looked_through and is_grad_enabled and self.size < self._forgot[1] + SWEEP_EVENTS:
            return False  # another module of the same step: little more can be forgotten
        if self._pending.entries and self._must_settle(has_closed):
            events = self.record.events
        if not keep_all and not is_grad_enabled:
            is_cut = self.evaluation.may_cut(len(events)) and self._cut(events)
            if is_cut or self.evaluation.is_under_way:
                return False
        elif len(events) >= self.most // 2 and not keep_all and not self._has_open_graph():
            self.clear()  # a long rollout: what is differentiated now is to be recorded whole
            return True
        if events and events[0].index < self.closed_until:
            if len(events) < self._rests_until:
                return False
            closed_until = self.closed_until
            if closed_until > self.iteration_start and not self._window.is_too_large(events):
                closed_until = self.iteration_start
                if events[0].index >= closed_until:
                    return False
            self._record.complete = True
            self._forgot = (self.closed_until, len(events))
            if events[-1].index < closed_until <= self.iteration_start and self._keep_roots(events):
                return True
            closed = [e for e in events if e.index < closed_until]
            if self.ahead.kept:
                self.ahead.look(closed)
            later = events[len(closed) :]
            self._keep(still_used(closed, later, self.iteration_start, self.producers.writers, self.ahead.kept))
            return True
        if not keep_all and self._may_sweep(events):
            tell_calls(self.record)  # their operands would keep each other alive
            events = self.record.events
            kept = still_used(events, [], self.iteration_start, self.producers.writers)
            if is_evaluating(events):
                self.evaluation.note_dropped(events, kept, self.producers.known)
            self._keep(kept)
            self._sweep_at = max(SWEEP_EVENTS, 2 * len(self.record.events))
        return False

    def _must_settle(self, has_closed: bool) -> bool:
        """Whether so much is kept that what is pending has to be counted and looked through with the rest."""
        size = self.size
        is_due = not has_closed and size > self._sweep_at and not self._is_amid_training()
        if is_due or len(self._pending.entries) > SETTLED_AT or size > self.most // 2:
            return True
        if torch.is_grad_enabled():
            return False
        return self.evaluation.is_under_way or self.evaluation.may_cut(size) or is_evaluating(self.kept_since(0))

    def _is_amid_training(self) -> bool:
        """Whether a module was called with gradients since the last backward pass: most of what is kept is still wanted."""
        return any(type(event) is RootCall and event.modes.grad for event in self.kept_since(self.closed_until))

    def _has_open_graph(self) -> bool:
        """Whether anything that was made since the last backward pass, and is still there, wants a gradient."""
        made = (ref() for event in since(self._record.events, self.closed_until) for ref in event.outputs)
        return any(tensor is not None and tensor.requires_grad for tensor in made)

    def forget_before(self, start: int) -> None:
        """Drop the events before `start`, in a loop whose steps hang together: what they made and is in use is given."""
        later = [event for event in self.kept_since(start) if not isinstance(event, (TapedCall, BackwardCall))]
        if any(ref.event < start for event in later if event.index >= start for ref in refs_of(event)):
            self.settle()
        events = self._record.events
        if events and events[0].index < start:
            self._record.events = cut_before(events, start)
            self._holders.clear()
        elif not self._pending.entries or self._pending.entries[0][0].index >= start:
            return
        self._pending.drop_before(start)
        self._record.complete = True
        self.producers.forget({event.index for event in self.kept_since(0)})

    def _cut(self, events: list[Event]) -> bool:
        """If this is a long evaluation, all that it has made so far is given from here on."""
        closed = bisect_left(events, self.closed_until, key=attrgetter("index"))
        made = events[closed:]
        if not self.evaluation.may_cut(len(made)) or not is_evaluating(made):
            return False
        self.evaluation.cut(made, self.lookup, self.slice)
        kept = {event.index for event in events[:closed]}
        self.producers.keep_made_by(kept)
        self._keep(kept)
        self._record.complete = True
        return True

    def _may_sweep(self, events: list[Event]) -> bool:
        """Without a backward pass: at twice as many events, in an evaluation sooner."""
        return len(events) > self._sweep_at or (len(events) >= self._rests_until and is_evaluating(events))

    def _keep_roots(self, events: list[Event]) -> bool:
        """Of a finished iteration keep the calls of modules whose results are in use. False where they need others."""
        live: list[RootCall] = []
        for event in events:
            if type(event) is RootCall and has_live_result(event):
                live.append(event)  # (a comprehension is a frame more, before 3.12)
        if not (live or self.ahead.kept or self._pending.entries):
            events.clear()
            self.producers.forget_all()
            if self._holders.have_seen:
                self._holders.clear()
            return True
        if self.ahead.kept or len(live) > KEPT_ROOTS or any(refs_of(root) for root in live):
            return False
        pending = self._pending.entries
        self.producers.keep_only(live, pending[0][0].index if pending else None)
        self._holders.clear()
        events[:] = live
        return True

    def _keep(self, kept: set[int]) -> None:
        self._record.events = [e for e in self._record.events if e.index in kept]
        pending = self._pending.entries  # (what was kept in short since is no less in use)
        self.producers.forget(kept.union(entry[0].index for entry in pending) if pending else kept)
        self._holders.clear()
        self._window.clear()
        found = len(self._record.events)
        self._rests_until = found + found // 4 if found > SWEEP_EVENTS else 0
