"""What earlier failures have spoiled: failures that only read a spoiled weight are consequences, and no incidents."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ampguard import compat
from ampguard.capture.raised import is_conversion_refusal
from ampguard.capture.record import BadResult, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.diagnose.cases.case import Case
from ampguard.incident import Incident
from ampguard.numerics import is_finite
from ampguard.replay.behind import events_behind, plain_weights

ASKED_EVERY = 16
"""Of so many consequences one is looked at: parameters that went bad stay so, unless a checkpoint is loaded."""


class Poison:
    """Which case has made the weights of the run non-finite, and which its buffers."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.case: Case | None = None
        """Whose update has made parameters bad: what fails after it and reads them is its doing."""
        self.buffers: dict[str, Case] = {}
        self._is_seen_in_weights = False
        """The case was told of weights that the script had just written: the step that reads them is not over."""
        self.unknown_since: int | None = None
        """Updates made when the first loss was bad that could not be replayed: bad parameters are its doing."""
        self.unknown_step: int | None = None
        """The step of that loss."""
        self._backwards = 0
        """Backward passes made when the case was told."""
        self._finite_then: weakref.WeakKeyDictionary[nn.Module, Case] = weakref.WeakKeyDictionary()
        """Of a script that never differentiates (it moves its weights by what it evaluates): modules that were called in a
        failure, and whose weights were finite."""
        self._left: Case | None = None
        """Told of bad gradients that the loop seemed to drop: the first window of an accumulation may yet end in an update."""
        self._recorder = recorder
        recorder.judge.gradients.on_left_used = self._left_are_used

    def began_with(self, case: Case) -> None:
        """An optimizer has just made its parameters non-finite, and `case` tells of it."""
        if self.case is None:
            case.updates -= 1  # the update that did it may have been counted already
            self.case = case

    def is_told_as(self, case: Case, story: Case) -> None:
        """A case is told as a part of another one."""
        if self.case is case:
            story.updates, self.case = case.updates, story

    def note(self, bad: BadResult, case: Case) -> None:
        """A bad result was told as `case`: the buffers that it spoiled, and the weights that its update will spoil."""
        for name in bad.names:
            self.buffers.setdefault(name, case)
        if bad.is_of_state:
            return  # whatever reads it spoils the weights
        if (
            bad.kind == "loss"
            and bad.mode != "train"
            and not (self._recorder.steps.attempts + self._recorder.steps.backwards)
        ):
            self._note_finite(bad, case)
        if bad.kind == "gradient":
            self._left = case if bad.is_held_off else None
        spoils = (bad.kind == "loss" and case.incident.severity != "info") or (
            bad.kind == "gradient" and not (bad.is_held_off or bad.is_replaced)
        )
        if bad.mode != "train" or not spoils or self.case is not None:
            return
        self._spoils(case, is_updated_at_once=bad.kind == "gradient")
        self._is_seen_in_weights = bad.is_of_weights

    def _spoils(self, case: Case, is_updated_at_once: bool) -> None:
        """What fails from the next update on is its doing; `is_updated_at_once`: that follows, whoever makes it."""
        case.updates, self._backwards = self._recorder.steps.attempts, self._recorder.steps.backwards
        if is_updated_at_once:
            case.updates -= 1
        self.case = case

    def _left_are_used(self) -> None:
        case, self._left = self._left, None
        if case is not None and self.case is None:
            self._spoils(case, is_updated_at_once=True)

    def _note_finite(self, bad: BadResult, case: Case) -> None:
        for module in {event.module for event in bad.record.events if isinstance(event, RootCall)}:
            if not has_bad_parameters(module):
                self._finite_then.setdefault(module, case)

    def buffer(self, name: str) -> Case | None:
        """The case that spoiled a buffer. Its name may have the name of what its module hangs in before it."""
        return next((case for known, case in self.buffers.items() if f".{name}".endswith(f".{known}")), None)

    def explains_buffer(self, name: str, bad: BadResult) -> bool:
        """Whether a training step only reads a buffer that an earlier one has spoiled; it is counted to that case then.

        An evaluation that does is told by itself: of running statistics it is all that the script shows.
        """
        case = self.buffer(name)
        if case is None or bad.mode != "train" or case.incident.mode != "train":
            return False
        case.consequences += 1
        case.last_step = bad.step
        self.note(bad, case)
        return True

    def made_by(self, buffer: str | None) -> Incident | None:
        """What has made a buffer bad; of None, what has made the parameters bad."""
        case = self.case if buffer is None else self.buffer(buffer)
        return case.incident if case is not None else None

    def explains(self, bad: BadResult) -> bool:
        """Whether a bad result only reads weights that an earlier update has spoiled; it is counted to that case then."""
        if self._finite_then and self._is_moved_by_failures(bad):
            return True
        case = self.case
        updates = case.updates if case is not None else self.unknown_since
        if updates is None or is_conversion_refusal(bad.error):
            return False
        failed = case.incident.step if case is not None else self.unknown_step
        is_later = failed is not None and bad.step > failed  # (a script may update its weights by itself)
        is_later = is_later or (self._is_seen_in_weights and not bad.is_of_weights)
        is_updated = self._recorder.steps.attempts > updates or is_later or self._recorder.is_in_closure
        if not is_updated and not self._is_behind_an_ascent(bad, updates):
            return False
        if case is None:
            return self._reads_bad_parameters(bad, updates)
        if case.consequences % ASKED_EVERY == 0 and not self._reads_bad_parameters(bad, updates):
            return False
        case.consequences += 1
        case.last_step = bad.step
        return True

    def _is_moved_by_failures(self, bad: BadResult) -> bool:
        """Whether it reads weights that were finite in an earlier failure, and are not any more."""
        for event in events_behind(bad):  # (of what came before, more or less is still on record)
            case = self._finite_then.get(event.module) if isinstance(event, RootCall) else None
            if case is not None and isinstance(event, RootCall) and has_bad_parameters(event.module):
                case.consequences += 1
                case.last_step = bad.step
                return True
        return False

    def _is_behind_an_ascent(self, bad: BadResult, updates: int) -> bool:
        """Whether the script has moved its weights along the bad gradients itself, in the very step (SAM)."""
        is_differentiated = self.case is not None and self._recorder.steps.backwards > self._backwards
        return is_differentiated and self._reads_bad_parameters(bad, updates)

    def _reads_bad_parameters(self, bad: BadResult, updates: int) -> bool:
        """Whether a parameter is not finite: of the modules that were called, or of an optimizer that stepped since."""
        if any(has_bad_parameters(e.module) for e in bad.record.events if isinstance(e, RootCall)):
            return True
        if any(not is_finite(weight.detach()) for weight in plain_weights(bad.record)):
            return True
        groups = [group for o in self._recorder.steps.made_since(updates) for group in o.param_groups]
        return any(not is_finite(p.detach()) for group in groups for p in group["params"])


def has_bad_parameters(module: nn.Module) -> bool:
    """Whether any parameter is not finite."""
    with torch.no_grad():
        return any(not is_finite(p) for p in compat.all_parameters(module))
