"""Failures of models whose weights are spread over ranks: they are run again when the weights have been gathered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ampguard import compat
from ampguard.capture.events.operands import held_by
from ampguard.capture.flags import is_immediate
from ampguard.capture.record import BadResult, GlueOp
from ampguard.capture.recorder import FlightRecorder
from ampguard.diagnose.cases.sharded import modules_of
from ampguard.replay.whole_weights import WholeWeights


class Awaiting:
    """The bad results that wait for weights, each until they are whole or about to change."""

    def __init__(self, recorder: FlightRecorder, settle: Callable[[list[Awaited]], None]) -> None:
        """`settle`: handed those whose wait is over."""
        self._recorder = recorder
        self._settle = settle
        self.waiting: list[Awaited] = []

    def add(self, bad: BadResult, reason: str) -> None:
        """Wait with a bad result. `reason`: why it could not be run again at once."""
        self.waiting.append(Awaited(bad, reason, self._recorder.steps.attempts))
        self._recorder.on_weights_change = self._before_update
        if self.waiting[-1].weights.problem is not None:
            self.settle()

    def _before_update(self) -> None:
        self.settle(False)
        if not self.waiting:
            self._recorder.on_weights_change = None

    def settle_what_is_due(self) -> None:
        """Another failure is looked at: those whose weights are whole, or have changed, come first."""
        if any(a.weights.is_complete or a.updates != self._recorder.steps.attempts for a in self.waiting):
            self.settle()

    def settle_before(self, step: int) -> None:
        """An iteration ended: weights that did not come within the next one are not waited for."""
        if any(awaited.is_over(step) for awaited in self.waiting):
            self.settle(is_last=any(step > awaited.bad.step + 1 for awaited in self.waiting))

    def settle(self, is_last: bool = True) -> None:
        """Weights have been gathered, or are about to change. `is_last`: what is missing now is not waited for."""
        if not self.waiting or (not is_last and any(awaited.may_go_on for awaited in self.waiting)):
            return
        settled, self.waiting = self.waiting, []
        for awaited in reversed(settled):
            awaited.end()
        self._settle(settled)


class Awaited:
    """A bad result that is replayed once the weights behind it have come by, or given up before they change."""

    def __init__(self, bad: BadResult, reason: str, updates: int) -> None:
        """`updates`: optimizer steps so far."""
        self.bad = bad
        self.updates = updates
        self._reason = reason
        self.weights = WholeWeights([module for module in modules_of(bad) if compat.needs_other_ranks(module)])
        self.weights.begin()
        _keep_numbers(bad)

    @property
    def reason(self) -> str:
        """Why the step is not run again, where it is not."""
        missing = "a part of them was not gathered again before they changed"
        return f"{self._reason}; {self.weights.problem or missing}"

    @property
    def bad_as_a_whole(self) -> BadResult:
        """The bad result, of the gathered parameters in place of their parts."""
        return dataclasses.replace(self.bad, parameters=tuple(map(self.weights.of, self.bad.parameters)))

    def is_over(self, step: int) -> bool:
        """Whether to wait no longer, `step` being the one that comes next."""
        is_kept = self.bad.kind == "gradient"  # (those that an update uses are not waited for)
        return self.weights.is_complete or step > self.bad.step + 1 or not is_kept

    @property
    def may_go_on(self) -> bool:
        """Whether there is something to wait for that the next update leaves alone."""
        return not self.weights.is_complete and self.weights.survive_updates

    def end(self) -> None:
        """Wait no longer."""
        self.weights.end()


def _keep_numbers(bad: BadResult) -> None:
    """Copy what is a single number and may be written to before the replay: the loss scale."""
    for held in (held for event in bad.record.events if isinstance(event, GlueOp) for held in held_by(event)):
        if held.copy is None and held.tensor.numel() == 1 and is_immediate(held.tensor) and held.is_intact:
            held.copy = held.value.detach().clone()
