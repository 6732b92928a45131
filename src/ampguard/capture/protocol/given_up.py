"""Iterations that the script itself gives up: it differentiates, throws the gradients away, and asks no optimizer.

`if overflow: scale /= 2; zero_grad(); continue` is an attempted step as one that a scaler skips is. It counts as one where
that is certain: there is one optimizer; as many backward passes as a step has had went by without one, the last of them
from where a step's last one comes; the gradients are gone (cleared, or all None or 0 as the next forward pass begins); and
there was a reason: a loss or a gradient was not finite, or the scale in front of the loss is lower in the next pass
(`judge.py`). Finite gradients that are thrown away (an attack, a search for a learning rate, a look at saliency) are no step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.protocol.models import Models
from ampguard.capture.protocol.moves import Moves
from ampguard.capture.record import Line
from ampguard.capture.recorder import FlightRecorder


class GivenUp:
    """Asked where the step is overdue; an ordinary iteration never comes here."""

    def __init__(self, recorder: FlightRecorder, moves: Moves, models: Models) -> None:
        self._recorder = recorder
        self._moves = moves
        self._models = models
        self._was_bad = False
        """Whether some gradient since the last step was not finite."""
        self._place: Line | None = None
        """Where the last backward pass before a step was called."""
        self._known = 0
        """Iterations that had been given up when it was last asked."""

    def stepped(self) -> None:
        """An optimizer's step was attempted."""
        self._was_bad = False
        self._place = self._recorder.backward_calls.place
        self._recorder.judge.has_thrown_away = 0

    def passes_before(self) -> int:
        """Backward passes of an iteration that was given up since this was last asked, as the loss has shown."""
        steps = self._recorder.steps
        if steps.given_up_in_all == self._known:
            return 0
        self._known, self._was_bad = steps.given_up_in_all, False
        return self._recorder.judge.passes_given_up

    def look(self, waiting: int, is_bad: bool, cleared: Iterable[Tensor] | None) -> bool:
        """The step that was due has not come; `waiting`: backward passes since the last. Whether it was given up for certain.

        `is_bad`: some gradient is not finite. `cleared`: those whose gradients are being cleared; None: it is a forward pass
        that begins.
        """
        recorder, judge = self._recorder, self._recorder.judge
        self._was_bad |= is_bad
        if recorder.steps.counts_backwards or not recorder.steps.is_of_one:
            return False
        if self._place is not None and recorder.backward_calls.place != self._place:
            return False
        if not (self._are_gone() if cleared is None else self._are_these(cleared)):
            return False
        if self._is_for_bad_numbers():
            self._count(waiting)
            return True
        judge.has_thrown_away = waiting  # perhaps the scale is lower now: the next loss will show it
        return False

    def run_ends(self, waiting: int, is_bad: bool) -> None:
        """Nothing comes any more: a script that gives up such iterations has given up this one."""
        steps, place = self._recorder.steps, self._recorder.backward_calls.place
        self._was_bad |= is_bad
        if steps.given_up_in_all and steps.is_of_one and self._place in (None, place) and self._is_for_bad_numbers():
            self._count(waiting)

    def _is_for_bad_numbers(self) -> bool:
        return self._was_bad or self._recorder.judge.bad_loss_step == self._recorder.steps.count

    def _count(self, waiting: int) -> None:
        self._recorder.judge.give_up(waiting, is_for_bad_numbers=True)
        self.passes_before()

    def _trained(self) -> Iterator[Tensor]:
        for watch in self._moves.mine():
            yield from watch.parameters()
        for module in self._models.mine():
            yield from compat.all_parameters(module)

    def _are_gone(self) -> bool:
        return all(p.grad is None or _is_zero(p.grad) for p in self._trained())

    def _are_these(self, cleared: Iterable[Tensor]) -> bool:
        ids = set(map(id, cleared))
        return all(id(p) in ids for watch in self._moves.mine() for p in watch.parameters() if p.grad is not None)


def cleared_by(of: object) -> list[Tensor]:
    """The parameters of an optimizer, or of a module."""
    if isinstance(of, nn.Module):
        return list(compat.all_parameters(of))
    return [p for group in getattr(of, "param_groups", ()) for p in group["params"]]


def _is_zero(gradient: Tensor) -> bool:
    """Waits for the device; only where a step is overdue."""
    if gradient.is_sparse or type(gradient) is not Tensor or not compat.has_values(gradient):
        return False
    return not bool(gradient.detach().any())
