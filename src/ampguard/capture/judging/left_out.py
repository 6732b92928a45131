"""Losses that a script has found to be bad (`torch.isnan(loss)`), and put others in the place of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ampguard.capture.events.operands import held_by, refs_of
from ampguard.capture.judging.meant import holds_no_operand
from ampguard.capture.record import GlueOp, Held, Ref, RootCall, StepRecord


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

    def left_out(self, record: StepRecord, losses: Sequence[Ref | Held]) -> set[Ref]:
        """Those that have no part in what is differentiated, and are no figures (a perplexity) made of a part of that.

        What a call of the model returns is a loss; any other number is taken for one where something stands in its place.
        """
        terms, self._terms = self._terms, {}
        if not terms:
            return set()
        parts = _made_of(record, losses)
        is_put_in = any(isinstance(loss, Held) for loss in losses) or any(_is_constant(record, part) for part in parts)
        return {
            number
            for number, made_of in terms.items()
            if number not in parts
            and made_of.isdisjoint(parts)
            and (is_put_in or isinstance(record.event(number.event), RootCall))
        }


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


def _is_constant(record: StepRecord, ref: Ref) -> bool:
    """Whether a single number was made of nothing (`torch.zeros(())`), or of the form of another one (`zeros_like`)."""
    event, tensor = record.event(ref.event), _result(record, ref)
    is_made = isinstance(event, GlueOp) and (holds_no_operand(event) or not (refs_of(event) or held_by(event)))
    return is_made and (tensor is None or tensor.numel() == 1)


def _is_loss(record: StepRecord, ref: Ref) -> bool:
    tensor = _result(record, ref)
    return tensor is not None and tensor.numel() == 1 and tensor.requires_grad


def _result(record: StepRecord, ref: Ref) -> Tensor | None:
    event = record.event(ref.event)
    return event.outputs[ref.output]() if event is not None and ref.output < len(event.outputs) else None
