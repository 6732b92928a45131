"""Figures that a script reads of an evaluation and that it may well expect to be NaN: in arrays, made of counts, or handed
to a metric that looks whether they are.

`numpy.nanmean` over classes passes over one that did not come, and so may whoever reads a precision of 0 / 0. Whether it
is a failure all the same, its cause tells, once it is known. Each line is looked at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampguard.capture.events.operands import refs_of
from ampguard.capture.flags import is_immediate
from ampguard.capture.glue.preprocessing import MOVES
from ampguard.capture.protocol.script_lines import is_script_code
from ampguard.capture.record import GlueOp, Held, Ref, RootCall, StepRecord
from ampguard.numerics import is_finite

LARGEST = 1 << 18
"""Elements up to which an array is looked at."""

MOST_EVENTS = 512
"""Events behind a figure that are gone through."""

SPREADS = frozenset({"repeat", "expand", "tile"})
"""Operators by which a number becomes an array: a batch's loss, once for each of its samples."""


SELECTIONS = frozenset({"index", "__getitem__", "masked_select"})
"""Operators, and calls that are kept in their place, that choose elements by a mask."""


class Figures:
    """Knows which lines were looked at."""

    def __init__(self) -> None:
        self._lines: set[tuple[str, int]] = set()

    def may_tell(self, tensor: Tensor) -> bool:
        """Whether an array that the script reads holds what is not finite, and more than an infinity with a meaning."""
        if not tensor.is_floating_point() or tensor.numel() > LARGEST or not is_immediate(tensor):
            return False
        values = tensor.detach()
        return not is_finite(values) and bool(torch.isnan(values).any() or torch.isposinf(values).all())

    def is_first_of_its_line(self, record: StepRecord, ref: Ref) -> bool:
        """Whether no figure of the line that made this one was looked at."""
        event = record.event(ref.event)
        if event is None or event.line is None:
            return False
        line = event.line.code.co_filename, event.line.number
        is_first = line not in self._lines
        self._lines.add(line)
        return is_first

    def is_of_counts(self, record: StepRecord, ref: Ref) -> bool:
        """Whether whole numbers lead from a call of a module to a figure, the first of its line."""
        waiting, seen = [ref.event], set[int]()
        while waiting and len(seen) < MOST_EVENTS:
            event = record.event(waiting.pop())
            if isinstance(event, RootCall) and not event.is_function:
                return not event.modes.grad and self.is_first_of_its_line(record, ref)
            if isinstance(event, GlueOp) and event.index not in seen:
                seen.add(event.index)
                waiting += [behind.event for behind in refs_of(event)]
        return False


def is_asked_by_a_library(record: StepRecord, ref: Ref) -> bool:
    """Whether it is a library that asks whether a number is NaN, as a metric does that leaves such numbers out of its mean."""
    event = record.event(ref.event)
    return event is not None and event.line is not None and not is_script_code(event.line.code)


def is_all_bad(tensor: Tensor) -> bool:
    """Whether no number of an array is finite."""
    return not bool(torch.isfinite(tensor.detach()).any())


def is_spread(record: StepRecord, ref: Ref) -> bool:
    """Whether a single number was repeated, perhaps beside others."""
    waiting, seen = [ref.event], set[int]()
    while waiting and len(seen) < MOST_EVENTS:
        event = record.event(waiting.pop())
        if not isinstance(event, GlueOp) or event.index in seen:
            continue
        seen.add(event.index)
        name = getattr(getattr(event.func, "overloadpacket", event.func), "__name__", "")
        if (
            name in SPREADS
            and len(event.args) > 1
            and isinstance(event.args[1], (list, tuple))
            and len(event.args[1]) == 1
        ):
            return True
        if name in MOVES:
            waiting += [behind.event for behind in refs_of(event)]
    return False


def is_of_groups(record: StepRecord, ref: Ref) -> bool:
    """Whether a figure is of those elements of a result that a mask has chosen, and the same line has chosen others of it as
    well: the mean of each class, of which one may not have come."""
    selection, on = _selection_behind(record, ref)
    if selection is None or selection.line is None:
        return False
    place = selection.line.code, selection.line.number
    others = (
        event
        for event in record.events
        if isinstance(event, GlueOp) and event.line is not None and (event.line.code, event.line.number) == place
    )
    return any(e is not selection and _is_selection(e) and _base_of(e) == on for e in others)


def _selection_behind(record: StepRecord, ref: Ref) -> tuple[GlueOp | None, object]:
    """The operator that has chosen what a figure was computed from, and out of what."""
    event = record.event(ref.event)
    for _ in range(8):
        if not isinstance(event, GlueOp):
            break
        if _is_selection(event):
            return event, _base_of(event)
        behind = refs_of(event)
        event = record.event(behind[0].event) if behind else None
    return None, None


def _is_selection(event: GlueOp) -> bool:
    name = getattr(getattr(event.func, "overloadpacket", event.func), "__name__", "")
    return name in SELECTIONS and len(event.args) > 1


def _base_of(event: GlueOp) -> object:
    base = event.args[0]
    return (base.event, base.output) if isinstance(base, Ref) else id(base.tensor) if isinstance(base, Held) else None
