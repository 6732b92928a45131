"""Where the way from a loss to some parameters is cut: under `no_grad`, by `.detach()`, by an operator without derivative."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from ampguard import compat
from ampguard.capture.events.operands import held_by, refs_of
from ampguard.capture.record import BackwardCall, Event, GlueOp, Line, RootCall, StepRecord

NO_GRAD = "ran under `torch.no_grad()` (or `inference_mode`)"
DETACH = "cut the graph (`.detach()`, `.data`)"
DISCRETE = "has no derivative"

MAX_OBSTACLES = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """One place: the line, and what it did."""

    line: Line
    how: str


def cuts(record: StepRecord, parameters: Iterable[Tensor]) -> list[Cut]:
    """The places behind the last differentiated loss, nearest to the parameters, where gradients for them end.

    Empty where the loss was not computed from them outside of modules.
    """
    wanted = {id(parameter) for parameter in parameters}
    calls = [e for e in record.events if isinstance(e, BackwardCall) and not e.create_graph]
    behind = _behind(calls[-1], record) if calls else iter(())
    obstacles = ((event, how) for event in behind if (how := _obstacle(event)) is not None)
    found: dict[tuple[int, int], Cut] = {}
    for event, how in itertools.islice(obstacles, MAX_OBSTACLES):
        if event.line is not None and any(_uses(e, wanted) for e in (event, *_behind(event, record, _is_open))):
            found.setdefault((id(event.line.code), event.line.number), Cut(event.line, how))
    return list(found.values())


def holder(record: StepRecord, parameters: Iterable[Tensor]) -> RootCall | None:
    """The call of a module that the last differentiated loss was computed from, which holds the parameters and lets gradients
    through: where they get none, its forward pass itself keeps it from them."""
    wanted = {id(parameter) for parameter in parameters}
    calls = [e for e in record.events if isinstance(e, BackwardCall) and not e.create_graph]
    behind = _behind(calls[-1], record, _is_open) if calls else iter(())
    return next((e for e in behind if isinstance(e, RootCall) and _is_open(e) and _uses(e, wanted)), None)


def in_words(places: list[Cut]) -> str:
    """ "`features = encoder(x)` (train.py:12) ran under `torch.no_grad()`"; "" where there is none."""
    texts = []
    for place in places[:3]:
        where = place.line.location()
        texts.append(f"`{where.code}` ({where.file.rsplit('/', 1)[-1]}:{where.line}) {place.how}")
    return "; ".join(texts)


def _behind(event: Event, record: StepRecord, passes: Callable[[Event], bool] = lambda event: True) -> Iterator[Event]:
    """The events that `passes` lets through whose results went into `event`, the latest first."""
    used = {ref.event for ref in refs_of(event)}
    for maker in reversed(record.events):
        if maker.index in used and maker.index < event.index and passes(maker):
            yield maker
            used |= {ref.event for ref in refs_of(maker)}


def _is_open(event: Event) -> bool:
    return _obstacle(event) is None


def _obstacle(event: Event) -> str | None:
    """Why no gradient passes through the results of an event."""
    if isinstance(event, RootCall):
        return None if event.modes.grad and not event.modes.inference else NO_GRAD
    if not isinstance(event, GlueOp):
        return None
    if event.func.name() == "aten::detach":
        return DETACH
    if not event.grad:
        return NO_GRAD
    return None if any(event.floating) else DISCRETE


def _uses(event: Event, wanted: set[int]) -> bool:
    """Whether an event computes with one of the parameters."""
    if isinstance(event, RootCall) and any(id(p) in wanted for p in compat.all_parameters(event.module)):
        return True
    return any(id(held.tensor) in wanted for held in held_by(event))
