"""Averages of weights that the script keeps in low precision and writes in every step: do they move at all?

`mean.mul_(0.999).add_(weight, alpha=0.001)` in bfloat16 adds less than half of the distance between two numbers, and rounds
it away. What was recorded as written between two steps is computed once more on copies, in the weights' own precision and
in float32, in a few iterations of a run. Averages that are no parameters of a module: `remade_averages.py`; those that one
operator writes for all weights: `foreach_averages.py`; those that a module writes in its own forward pass:
`hidden_averages.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.events.written_weights import parameter_behind
from ampguard.capture.protocol.foreach_averages import foreach_averages
from ampguard.capture.protocol.hidden_averages import Seen, pairs, stands_still
from ampguard.capture.protocol.models import Models
from ampguard.capture.protocol.remade_averages import remade_averages
from ampguard.capture.protocol.scans import LOOKS
from ampguard.capture.record import GlueOp, Held, Ref, StepRecord
from ampguard.capture.sampling.weights import slice_of
from ampguard.numerics import is_low_precision
from ampguard.protocol.events import Breach

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Moves

FIRST_STEP = 16
EVERY = 256
"""Steps, so that what begins late is looked at twice before long. (What is written is recorded in some steps only.)"""
APART = 16
"""Steps between two looks at an average, at least."""
MOST = 6
LARGEST = 1 << 20
DEEPEST = 8
LOST_SHARE = 0.5
MOVES_IN_FLOAT32 = 0.9


class CannotTellError(Exception):
    """What was written was not recorded."""


@dataclass(slots=True)
class _First:
    """An average when it was first looked at, or had moved."""

    parameter: weakref.ref[Tensor]
    step: int
    values: Tensor

    def is_still(self, now: Tensor) -> bool:
        """Whether most of it stands where it stood: else it moves, or was written anew (copied in a warm-up) since."""
        sliced = slice_of(now)
        return sliced.dtype == self.values.dtype and float((sliced == self.values).float().mean()) > LOST_SHARE


@dataclass(frozen=True, slots=True)
class Lost:
    """What rounding does to an average. `share` of what would move in float32 has stood still since `since`."""

    parameter: Tensor
    share: float
    in_float32: float
    step_size: float
    spacing: float
    dtype: torch.dtype
    since: int
    last: GlueOp


class Averages:
    """Asked when a step begins and weights were written since the last one."""

    def __init__(self, moves: Moves, models: Models) -> None:
        self._moves = moves
        self._models = models
        self._first: dict[int, _First] = {}
        self._hidden: dict[int, Seen] = {}
        """Frozen parameters that a module may write in its own forward pass."""
        self._has_told = False

    def written(self, weights: Callable[[], list[Tensor]], record: Callable[[], StepRecord]) -> None:
        """The script has written to these, or may have made others."""
        step = self._moves.recorder.steps.count
        if self._has_told or step < FIRST_STEP or (step not in LOOKS and step % EVERY):
            return
        self._parameters(weights, record)
        if not self._has_told:
            self._remade(record())
        if not self._has_told:
            self._written_inside(step)

    def _written_inside(self, step: int) -> None:
        """Averages that a module writes where no operator is recorded."""
        with torch.no_grad(), compat.unseen():
            found = pairs([module for module, _ in self._models.roots()], LARGEST, MOST)
            known = [(pair, self._hidden.get(id(pair[0]))) for pair in found]
            due = [seen for _, seen in known if seen is not None and step - seen.step >= APART]
            still = [answer for seen in due if (answer := stands_still(seen, step)) is not None]
            for (parameter, weight), seen in known:
                if seen is None or seen.parameter() is not parameter:
                    self._hidden[id(parameter)] = Seen.of(parameter, weight, step)
        if still:
            self._has_told = True
            worst = max(still, key=lambda each: each.share)
            facts = {"hidden": worst, "parameters": [each.parameter for each in still], "noticed": step}
            where = self._models.called_at(worst.parameter)
            self._moves.tell([Breach("lost-update", None, None, None, where, None, facts)], worst.since)

    def _remade(self, record: StepRecord) -> None:
        """Averages that no module holds. The weight that each is of tells them apart."""
        step = self._moves.recorder.steps.count
        trained = [p for watch in self._moves.mine() for p in watch.sample]
        if not trained:
            return
        with torch.no_grad(), compat.unseen():
            found = remade_averages(record, trained, LARGEST, MOST)
            found = found or foreach_averages(record, trained, self._held, LARGEST, MOST)
            known = [(each, self._first.get(id(each.weight))) for each in found]
            lost = [
                answer
                for each, first in known
                if first is not None and first.parameter() is each.weight and step - first.step >= APART
                if (answer := _stuck(each.weight, (each.old, each.now, each.wide), first, each.last)) is not None
            ]
            for each, first in known:
                if first is None or first.parameter() is not each.weight or not first.is_still(each.now):
                    values = slice_of(each.now).clone()
                    self._first[id(each.weight)] = _First(weakref.ref(each.weight), step, values)
        if lost and len(lost) > LOST_SHARE * len(known):
            self._has_told = True
            self._tell(sorted(lost, key=lambda each: -each.share), is_of_weight=True)

    def _held(self) -> list[Tensor]:
        return [p for watch in self._moves.mine() for p in watch.parameters()]

    def _parameters(self, weights: Callable[[], list[Tensor]], record: Callable[[], StepRecord]) -> None:
        """Parameters of modules, which the script writes to."""
        step = self._moves.recorder.steps.count
        found = [p for p in weights() if not p.requires_grad and is_low_precision(p.dtype) and p.numel() <= LARGEST]
        chosen = [found[i * (len(found) - 1) // (MOST - 1)] for i in range(MOST)] if found else []
        known = [(p, self._first.get(id(p))) for p in {id(p): p for p in chosen}.values()]
        with torch.no_grad(), compat.unseen():
            lost = [
                answer
                for p, first in known
                if first is not None and first.parameter() is p and step - first.step >= APART
                if (answer := lost_in(p, first, record())) is not None
            ]
            for p, first in known:
                if first is None or first.parameter() is not p or not first.is_still(p):
                    self._first[id(p)] = _First(weakref.ref(p), step, slice_of(p).clone())
        if lost and len(lost) > LOST_SHARE * len(known):
            self._has_told = True
            self._tell(sorted(lost, key=lambda each: -each.share))

    def _tell(self, lost: list[Lost], is_of_weight: bool = False) -> None:
        """`is_of_weight`: they are called by the weights that they are averages of."""
        moves, worst = self._moves, lost[0]
        facts = {"lost": lost, "parameters": [each.parameter for each in lost], "noticed": moves.recorder.steps.count}
        facts["is_of_weight"] = is_of_weight
        moves.tell([Breach("lost-update", None, None, None, worst.last.line, None, facts)], worst.since)


def lost_in(parameter: Tensor, first: _First, record: StepRecord) -> Lost | None:
    """Whether most of what the last writes would move in float32 stands where it stood. None too where that cannot be told."""
    writes = [
        event
        for event in record.events
        if isinstance(event, GlueOp) and event.args and parameter_behind(event, lambda: record) is parameter
    ]
    writes = [event for event in writes if compat.positions_written(event.func) == {0}]
    if not writes:
        return None
    try:
        narrow, wide = (_written_again(parameter, writes, record, dtype) for dtype in (parameter.dtype, torch.float32))
    except Exception:  # an operator refuses, or something is gone: nothing can be said
        return None
    return _stuck(parameter, (parameter, narrow, wide), first, writes[-1])


def _stuck(parameter: Tensor, values: tuple[Tensor, Tensor, Tensor], first: _First, last: GlueOp) -> Lost | None:
    """The same of an average before a write, after it, and after it in float32."""
    now, narrow, wide = map(slice_of, values)
    before = now.float()
    moves = (wide != before) & wide.isfinite()
    in_float32 = float(moves.float().mean())
    if parameter.dtype != now.dtype:  # a weight: an average that is as near to it as its numbers are has arrived
        moves &= slice_of(parameter).to(now.dtype) != now
        if float(moves.float().mean()) <= LOST_SHARE:
            return None
    stuck = moves & (narrow == now) & (now == first.values)
    share = float(stuck.sum()) / max(float(moves.sum()), 1.0)
    if in_float32 < MOVES_IN_FLOAT32 or share <= LOST_SHARE:
        return None
    info = torch.finfo(values[0].dtype)
    spacing = torch.exp2(torch.floor(torch.log2(before.abs().clamp_min(float(info.tiny))))) * info.eps
    size = float((wide - before).abs().median())
    if size >= float(spacing.median()):
        return None
    return Lost(parameter, share, in_float32, size, float(spacing.median()), values[0].dtype, first.step, last)


def _written_again(parameter: Tensor, writes: list[GlueOp], record: StepRecord, dtype: torch.dtype) -> Tensor:
    """The average after the same writes once more, computed in `dtype`."""
    value = parameter.detach().to(dtype, copy=True)
    for event in writes:
        rest = [_value(arg, parameter, value, record, 0) for arg in event.args[1:]]
        kwargs = {name: _value(arg, parameter, value, record, 0) for name, arg in event.kwargs.items()}
        event.func(value, *rest, **kwargs)
    return value


def _value(arg: Any, parameter: Tensor, value: Tensor, record: StepRecord, depth: int) -> Any:
    """An operand: the average itself stands for what is computed of it, all else is as it is, in the same precision."""
    if isinstance(arg, (list, tuple)):
        return type(arg)(_value(item, parameter, value, record, depth) for item in arg)
    if isinstance(arg, Held):
        return value if arg.tensor is parameter else _as_wide(arg.tensor.detach(), value)
    if not isinstance(arg, Ref):
        return arg
    event = record.event(arg.event)
    if (
        not isinstance(event, GlueOp)
        or depth > DEEPEST
        or event.rng is not None
        or compat.positions_written(event.func)
    ):
        raise CannotTellError
    args = [_value(item, parameter, value, record, depth + 1) for item in event.args]
    kwargs = {name: _value(item, parameter, value, record, depth + 1) for name, item in event.kwargs.items()}
    output = event.func(*args, **kwargs)
    made = list(_flat(output))[arg.output]
    return _as_wide(made, value) if isinstance(made, Tensor) else made  # the script may cast to the average's dtype


def _as_wide(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like.dtype) if tensor.is_floating_point() and like.dtype is torch.float32 else tensor


def _flat(output: Any) -> Iterator[Any]:
    yield from output if isinstance(output, (list, tuple)) else (output,)
