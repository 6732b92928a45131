"""Schedulers of learning rates that move on although the step of their optimizer was skipped: how much is lost by it?

While the scale settles, the first few steps are skipped in most runs. What that takes off a schedule of a hundred thousand
moves is nothing; off one of forty, it is a lot. So it is measured by the schedule's own length, where the scheduler says it,
and else by the moves of the run. Where steps go on being skipped, it matters in any case.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.moves import Frame, Moves
from ampguard.capture.protocol.script_lines import script_line
from ampguard.protocol.events import Breach

LOST_MOVES = 3
"""Fewer are nothing."""
LOST_SHARE = 0.1
"""Of a schedule, or of the moves of a run."""
LOST_WARM_UP = 0.5
"""Of a warm-up: more than so many moves, and half of it."""
LATE_MOVES, FEWEST_LATE = 32, 8
"""Moves behind the first step that was made, from which on it is told that steps go on being skipped; so many of them lost."""
MORE_MOVES = 1.125
"""By so much the moves have grown when what is only suspected is told with the new number."""


@dataclass(slots=True)
class _Known:
    """What is known of one scheduler."""

    scheduler: weakref.ref[Any]
    length: float | None
    warm_up: float | None
    moves: int = 0
    lost: int = 0
    lost_later: int = 0
    """After a step of the optimizer that was made."""
    moves_later: int = 0
    at_steps: int = -1
    taken: int = 0
    """The optimizer's steps, attempted and made, at the last move."""
    first_lost: int = 0
    """The step of the first move without the optimizer."""
    noted_at: int = 0
    """The moves when that was last noted."""
    is_told: bool = False

    @property
    def is_for_certain(self) -> bool:
        """Whether a material part of it is lost, whatever may come."""
        if self.lost < LOST_MOVES:
            return False
        may_go_on = self.lost_later >= FEWEST_LATE and self.moves_later >= LATE_MOVES
        if may_go_on and self.lost_later >= LOST_SHARE * self.moves_later:
            return True
        is_half = self.warm_up is not None and self.lost >= LOST_WARM_UP * self.warm_up
        has_lost_warm_up = is_half and self.lost > LOST_MOVES
        return has_lost_warm_up or (self.length is not None and self.lost >= LOST_SHARE * self.length)

    @property
    def matters(self) -> bool:
        """Whether it is a material part as far as the run has come."""
        is_large = self.length is None and self.lost >= max(LOST_MOVES, LOST_SHARE * self.moves)
        return is_large or self.is_for_certain


class Schedules:
    """Follows the moves of each scheduler."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._known: dict[int, _Known] = {}

    def moved(self, scheduler: Any, frame: Frame) -> None:
        """A learning-rate scheduler has stepped; did its optimizer, since the last time?"""
        optimizer = getattr(scheduler, "optimizer", None)
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer):
            return
        watch = self._moves.watches.optimizer(optimizer)
        known = self._of(scheduler)
        stepping = self._moves.stepping
        if stepping is not None and stepping[1] is watch:
            return  # it moves in a hook of its optimizer, which a skipped step does not run
        taken = watch.taken
        is_lost = watch.was_skipped and known.at_steps >= 0 and taken == known.taken and watch.steps > known.at_steps
        is_lost = is_lost or (known.at_steps < 0 and watch.was_skipped and taken == 0)
        known.moves, known.at_steps, known.taken = known.moves + 1, watch.steps, taken
        known.moves_later += taken > 0
        if is_lost:
            self._lost(scheduler, known, watch, frame)
        elif known.lost and not known.is_told and known.moves >= MORE_MOVES * known.noted_at:
            self._note(scheduler, known, watch, frame)

    def _of(self, scheduler: Any) -> _Known:
        known = self._known.get(id(scheduler))
        if known is None or known.scheduler() is not scheduler:
            lengths = compat.schedule_length(scheduler), compat.warm_up_length(scheduler)
            self._known[id(scheduler)] = known = _Known(weakref.ref(scheduler), *lengths)
        return known

    def _lost(self, scheduler: Any, known: _Known, watch: OptimizerWatch, frame: Frame) -> None:
        if not known.lost:
            known.first_lost = self._moves.attempt
        known.lost += 1
        known.lost_later += known.taken > 0
        if not known.is_for_certain:
            self._note(scheduler, known, watch, frame)
            return
        known.is_told = True
        self._moves.listener.on_suspicion(("scheduler", id(scheduler)), None, 0)
        self._moves.tell([self._breach(scheduler, known, watch, frame)], known.first_lost)

    def _note(self, scheduler: Any, known: _Known, watch: OptimizerWatch, frame: Frame) -> None:
        """What the end of the run will tell, unless more is lost until then."""
        known.noted_at = known.moves
        breach = self._breach(scheduler, known, watch, frame)
        self._moves.name_scaler(breach)
        self._moves.listener.on_suspicion(("scheduler", id(scheduler)), breach, known.first_lost)

    def _breach(self, scheduler: Any, known: _Known, watch: OptimizerWatch, frame: Frame) -> Breach:
        facts = {
            "lost": known.lost,
            "moves": known.moves,
            "length": known.length,
            "warm_up": known.warm_up,
            "settling": not known.matters,
            "scheduler": scheduler,
            "rates": rates_of(scheduler),
        }
        stepped_at = self._moves.machine.ledger(watch).stepped_at
        return Breach("scheduler-on-skipped-step", watch, None, stepped_at, script_line(frame), None, facts)


def rates_of(scheduler: Any) -> list[float]:
    """The learning rates that it has set."""
    last: Callable[[], list[Any]] | None = getattr(scheduler, "get_last_lr", None)
    try:
        values = last() if last is not None else []
    except AttributeError:
        return []
    return [float(v) for v in values if not isinstance(v, Tensor) or v.is_cpu]
