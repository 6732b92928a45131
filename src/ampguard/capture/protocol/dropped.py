"""Gradients that a loop drops: backward was called, and the step that always follows did not come.

A loop that leaves an iteration early (`if not finite: continue`) may clear its gradients, or leave them to pile up.
Where as many backward passes as usual went by without a step, the gradients are looked at before the next forward
pass, before they are cleared, and at the end of the run; in an ordinary iteration nothing is looked at.
"""

from __future__ import annotations

import weakref
from threading import get_ident

from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.cleaned import are_masters
from ampguard.capture.protocol.given_up import GivenUp, cleared_by
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.models import Models
from ampguard.capture.protocol.moves import Moves
from ampguard.capture.protocol.passed_over import PassedOver
from ampguard.capture.record import BackwardCall, Line, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.numerics import is_finite
from ampguard.protocol.events import Breach

FIRST_LOOKS = 8
"""Looks before the first step of the run, when it is not yet known how many backward passes a step has."""

STUCK_LOOKS = 3
"""Iterations in a row that were given up for the same bad gradients, after which the run is stuck."""

SETTLING_LOOKS = 20
"""The same where a scaler would skip a step: till then, an accumulation window that has grown may yet come to its end."""
LIVE_LOOKS = 100
"""From here on it is told while the run goes on, without waiting for that end."""


class DroppedGradients:
    """Counts backward passes between steps."""

    def __init__(self, recorder: FlightRecorder, moves: Moves, models: Models) -> None:
        self.waiting = 0
        """Backward passes since the last step."""
        self.usual = 1
        """The most that were ever seen between two steps; until the first step, 1."""
        self._recorder = recorder
        self._moves = moves
        self._models = models
        self._left: dict[OptimizerWatch, tuple[weakref.ref[Tensor], int, int]] = {}
        """Bad gradients that nobody has cleared: one of them, since which step, and how many looks ago."""
        self._has_stepped = False
        self._first_looks = FIRST_LOOKS
        self._passed_over = PassedOver(recorder, moves)
        self._given_up = GivenUp(recorder, moves, models)

    def stepped(self) -> None:
        """An optimizer's step was attempted."""
        self.waiting -= self._given_up.passes_before()
        if self.waiting > self.usual:
            self.usual = self.waiting
        if self.waiting:
            self._given_up.stepped()
        self.waiting = 0
        if not self._has_stepped:
            self._passed_over.begin()
        self._has_stepped = True
        if self._left:
            for watch in self._left:
                self._moves.listener.on_suspicion(("stuck", watch), None, 0)
            self._left.clear()

    def look(
        self, cleared_at: Line | None = None, of: Optimizer | nn.Module | None = None, is_end: bool = False
    ) -> None:
        """The step that was due is passed over: have bad gradients judged, while the record of their making is there.

        `cleared_at`: where the script is about to clear those of `of`, so no later step is to use them. `is_end`: the run
        ends, as the script wants it to.
        """
        if self._recorder.turns.thread != get_ident():
            return  # the record is of another thread's step
        if self._moves.is_lost:
            self.waiting = 0
            return
        if self._recorder.steps.is_answered:
            self.stepped()  # one that was held off, or that an engine has left out
            return
        self.waiting -= self._given_up.passes_before()
        if self.waiting < self.usual:
            return
        is_bad = self._judge(cleared_at)
        if is_end:
            self._given_up.run_ends(self.waiting, is_bad)
        elif self._given_up.look(self.waiting, is_bad, cleared_by(of) if of is not None else None):
            self.waiting = 0

    def _judge(self, cleared_at: Line | None) -> bool:
        """Whether some gradient was seen not to be finite."""
        recorder = self._recorder
        if not self._has_stepped:
            self._first_looks -= 1
            if recorder.steps.counts_backwards:  # (where one has stepped, it may be gone by now)
                return False
        if recorder.counting or self._first_looks < 0:
            return False
        if not self._ends_with_backward():
            return False
        held = [
            p for watch in self._moves.mine() for p in watch.parameters() if p.grad is not None
        ] or self._of_called()
        bad = {id(p): p for p in held if p.grad is not None and not _is_finite(p.grad)}
        if bad:
            masters = self._masters()
            held = [p for p in held if id(p) not in masters]
            bad = {key: p for key, p in bad.items() if key not in masters}
        if not bad:
            self._left.clear()
            return False
        scaler = recorder.scaling.scaler
        scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None
        recorder.judge.gradients.are_bad(held, scale, is_held_off=True, is_passed_over=cleared_at is not None)
        if scaler is not None and scale is not None and cleared_at is not None:
            self._passed_over.note(scaler, scale, bad, cleared_at, self._has_stepped)
        if not self._has_stepped:
            return True  # perhaps the first window of an accumulation, in which the loss scale is too high yet
        for watch in self._moves.mine():
            worst = next((p for p in watch.parameters() if id(p) in bad), None)
            if worst is not None and worst.grad is not None:
                self._note_left(watch, worst.grad)
        return True

    def _masters(self) -> set[int]:
        """Parameters of optimizers that hold none of a module's, where modules are trained: no backward pass reaches them, and
        what is bad there was left by an earlier step until the script puts other gradients in its place."""
        reached = {id(p) for module, _ in self._models.roots() for p in compat.all_parameters(module)}
        each = (watch.parameters() for watch in self._moves.mine())
        return {id(p) for held in each if are_masters(held, reached) for p in held}

    def _of_called(self) -> list[Tensor]:
        """Of what was called, where the function that trained has returned and its optimizer is gone."""
        roots = {id(e.module): e.module for e in self._recorder.log.kept_since(0) if isinstance(e, RootCall)}
        return [p for root in roots.values() for p in compat.all_parameters(root) if p.grad is not None]

    def _note_left(self, watch: OptimizerWatch, gradient: Tensor) -> None:
        """Are these the bad gradients of an earlier iteration, to which others were added since?"""
        known, since, looks = self._left.get(watch, (None, 0, 0))
        step = self._recorder.steps.count
        if known is None or known() is not gradient:  # (not by its identity, which the next one may have)
            self._left[watch] = (weakref.ref(gradient), step, 1)
            return
        self._left[watch] = (known, since, looks + 1)
        scaler = self._recorder.scaling.scaler
        may_settle = scaler is not None and scaler.is_enabled()
        if looks + 1 == (LIVE_LOOKS if may_settle else STUCK_LOOKS):
            self._moves.listener.on_suspicion(("stuck", watch), None, 0)
            self._moves.tell([self._stuck(watch, looks + 1, since)], since)
        elif may_settle and looks + 1 == SETTLING_LOOKS:
            self._moves.listener.on_suspicion(("stuck", watch), self._stuck(watch, looks + 1, since), since)

    def _stuck(self, watch: OptimizerWatch, looks: int, since: int) -> Breach:
        last = self._moves.machine.last_backward
        where = last.where if last is not None else None
        facts = {"steps": looks, "is_stuck": True, "since_step": since}
        return Breach("missing-zero-grad", watch, None, where, where, None, facts)

    def _ends_with_backward(self) -> bool:
        """Whether no module was called since the last backward pass."""
        for event in reversed(self._recorder.log.kept_since(0)):
            if isinstance(event, BackwardCall):
                return True
            if isinstance(event, RootCall):
                return False
        return False


def _is_finite(gradient: Tensor) -> bool:
    if gradient.is_sparse:
        gradient = compat.stored_values(gradient)
    return type(gradient) is not Tensor or not compat.has_values(gradient) or is_finite(gradient.detach())
