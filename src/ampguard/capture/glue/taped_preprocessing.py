"""What a script computes before the first module of a step: from where on it is taped."""

from __future__ import annotations

import threading
import weakref
from types import FrameType
from typing import Any, Protocol

import torch

from ampguard import compat
from ampguard.capture.events.log import EventLog
from ampguard.capture.frames import is_user_code, locals_of
from ampguard.capture.glue.preprocessing import uses_computed
from ampguard.capture.glue.schedule import TapeSchedule
from ampguard.capture.glue.tape import GlueTape
from ampguard.capture.judging.carried import CarriedState
from ampguard.capture.protocol.script_lines import is_script_code
from ampguard.capture.root_calls.trees import map_tensors
from ampguard.capture.steps import StepCounter
from ampguard.capture.turns import Turns

LENT_OPS = 4096
"""Operators that are taped between `eval()` and the first module of an evaluation."""


class Taping(Protocol):
    """The recorder, as far as it is known here."""

    paused: bool
    between_steps: bool
    tapes_training: bool
    has_compiled_before: bool
    tape: GlueTape
    log: EventLog
    schedule: TapeSchedule
    steps: StepCounter
    turns: Turns
    carried: CarriedState

    def resume_tape(self) -> None: ...


class TapedPreprocessing:
    """Puts the tape on where a step's may begin: after the last one's bookkeeping, and where a batch comes."""

    def __init__(self, recorder: Taping) -> None:
        self.last_batch: Any = None
        """What the DataLoader gave last, with weak references in place of tensors."""
        self.batch_before: Any = None
        """And before that: a bad loss that is thrown away is looked at when the next step begins."""
        self.last_loader: weakref.ref[Any] | None = None
        self.backwards_before = 0
        """Backward passes before the running iteration, or before its last batch."""
        self.cleared_at = -1
        """The first event behind the call that clears the gradients between two steps; -1 before it."""
        self._recorder = recorder

    def bookkeeping_done(self, is_last: bool) -> None:
        """The scaler was updated, an optimizer stepped or its gradients were cleared.

        What the script computes from here to the first module is preprocessing and is taped; where a loop clears its
        gradients in between, from there on (`is_last`), and before that while steps use what is computed there. In the
        middle of an iteration, it belongs to the next optimizer's loss.
        """
        recorder = self._recorder
        if not recorder.between_steps:
            if not recorder.has_compiled_before:
                recorder.resume_tape()
        elif recorder.schedule.comes_next(is_last):
            if is_last and self.cleared_at < 0:
                self.cleared_at = recorder.log.next_index
            self._begin()

    def wonder(self) -> None:
        """An iteration ends: has it used what was computed before the call that cleared its gradients?"""
        log, schedule = self._recorder.log, self._recorder.schedule
        if self.cleared_at >= 0:
            events, began = log.record.events, log.iteration_start
            used = began < self.cleared_at and uses_computed(events, began, self.cleared_at, log.producers.writers)
            writes_state = self._recorder.carried.leaving.is_between_steps
            schedule.before_clearing_was(used or writes_state)

    def evaluation_begins(self) -> None:
        """Between two steps a model is put into evaluation mode: what the script lends it (averaged weights) is taped."""
        recorder = self._recorder
        if recorder.turns.thread == threading.get_ident() and not recorder.has_compiled_before:
            recorder.tapes_training = False
            recorder.tape.enter(LENT_OPS)

    def closure_begins(self) -> None:
        """An optimizer is about to call its closure. Where nothing was differentiated in the iteration, or since the last
        batch came, the closure is the step, and may compute before its first module.
        """
        if self._recorder.steps.backwards == self.backwards_before:
            self._begin()

    def optimizer_made(self, optimizer: torch.optim.Optimizer, frame: FrameType) -> None:
        """Where the script itself makes its optimizer, the first step may begin."""
        self._recorder.steps.created(optimizer)
        maker: FrameType | None = frame
        while maker is not None and (not is_user_code(maker.f_code) or locals_of(maker).get("self") is optimizer):
            maker = maker.f_back  # a class of its own, in a package, is still made by whoever asks for one
        has_begun = self._recorder.turns.has_begun
        if not has_begun and not compat.may_compile() and maker is not None and is_script_code(maker.f_code):
            self._begin()

    def note_batch(self, batch: Any, loader: Any = None) -> None:
        """A batch has left the DataLoader, by this iterator of it."""
        self.last_loader = weakref.ref(loader) if loader is not None else None
        self.backwards_before = self._recorder.steps.backwards
        self.batch_before = self.last_batch
        self.last_batch = map_tensors(batch, weakref.ref)
        if self.last_batch is batch:  # an object of another kind: it is not to live longer for us
            self.last_batch = weakref.ref(batch) if getattr(type(batch), "__weakrefoffset__", 0) else None
        self._recorder.carried.fetched = self._recorder.log.next_index
        self._begin()

    def _begin(self) -> None:
        recorder = self._recorder
        limit = 0 if recorder.has_compiled_before else recorder.schedule.prefix_limit
        if limit and recorder.turns.thread == threading.get_ident() and not recorder.paused:
            recorder.tapes_training = False
            recorder.tape.enter(limit)
