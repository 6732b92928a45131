"""Losses that a script has found to be bad (`torch.isnan(loss)`), and put others in the place of."""

from __future__ import annotations

from collections.abc import Iterable

from ampguard.capture.events.operands import refs_of
from ampguard.capture.judging.meant import holds_no_operand
from ampguard.capture.record import Held, Ref, StepRecord


class Questioned:
    """Bad numbers of training that the script has asked about since the last backward pass."""

    def __init__(self) -> None:
        self._terms: dict[Ref, set[Ref]] = {}
        """Of each, the losses that it was made from: single numbers that want a gradient."""

    def note(self, record: StepRecord, number: Ref) -> None:
        """The script has asked about this one."""
        self._terms[number] = {ref for ref in _made_of(record, [number]) if ref != number and _is_loss(record, ref)}

    def clear(self) -> None:
        """They are told, or nobody's business."""
        self._terms.clear()

    def left_out(self, record: StepRecord, losses: Iterable[Ref | Held]) -> set[Ref]:
        """Those that have no part in what is differentiated, and are no figures (a perplexity) made of a part of that."""
        terms, self._terms = self._terms, {}
        parts = _made_of(record, losses) if terms else set()
        return {number for number, made_of in terms.items() if number not in parts and made_of.isdisjoint(parts)}


def _made_of(record: StepRecord, results: Iterable[Ref | Held]) -> set[Ref]:
    """These results of events and all whose values they were computed from."""
    pending, found = [ref for ref in results if isinstance(ref, Ref)], set[Ref]()
    while pending:
        ref = pending.pop()
        event = record.event(ref.event) if ref not in found else None
        found.add(ref)
        if event is not None and not holds_no_operand(event):
            pending += refs_of(event)
    return found


def _is_loss(record: StepRecord, ref: Ref) -> bool:
    event = record.event(ref.event)
    tensor = event.outputs[ref.output]() if event is not None and ref.output < len(event.outputs) else None
    return tensor is not None and tensor.numel() == 1 and tensor.requires_grad
