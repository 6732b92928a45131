"""Bad results that were never differentiated: losses that a loop skips or stops on, outputs of an evaluation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.events import lineage
from ampguard.capture.events.log import EventLog
from ampguard.capture.events.operands import refs_of
from ampguard.capture.flags import is_immediate
from ampguard.capture.frames import locals_of
from ampguard.capture.judging.meant import is_own_constant
from ampguard.capture.record import Event, GlueOp, Ref, RootCall, StepRecord
from ampguard.capture.root_calls.bymodule import ByModule
from ampguard.numerics import UNINITIALISED, is_finite

_with_parameters: ByModule[bool] = ByModule()
"""Whether a module has parameters: it is asked at each of its calls, and to look is to walk through it."""


def may_begin_step(module: nn.Module, roots: list[RootCall]) -> bool:
    """Whether a call of this module, behind these, may be the next step's: it is called again.

    A criterion is called for each term of a loss. It has no parameters, and modules that have some are called before it.
    """
    if all(root.module is not module for root in roots):
        return False
    return _has_parameters(module) or not any(_has_parameters(root.module) for root in roots)


def _has_parameters(module: nn.Module) -> bool:
    known = _with_parameters.get(module)
    if known is None:
        known = _with_parameters.put(module, compat.has_parameters(module))
    return known


def discarded_loss(events: list[Event], waits: bool, is_known: Callable[[Ref], bool]) -> Ref | None:
    """The last number among the events' results that wants a gradient and is not finite. `waits`: on any device.

    `is_known`: what is no news is passed over (a running sum to which a bad loss was added earlier). A weight with a
    single element to which the script has written wants a gradient, too, and is no loss: nothing leads from it to others.
    """
    for event in reversed(events):
        for position, ref in enumerate(_returned_by(event)):
            tensor = ref()
            if tensor is None or tensor.numel() != 1 or not tensor.is_floating_point() or tensor.is_meta:
                continue
            if (
                tensor.requires_grad
                and compat.is_made(tensor)
                and (tensor.device.type == "cpu" or waits)
                and not is_finite(tensor)
            ):
                found = Ref(event.index, position)
                if not is_known(found):
                    return found
    return None


def _returned_by(event: Event) -> Sequence[weakref.ref[Tensor]]:
    """Its results but for those that a module has left in attributes, which nobody may ever read."""
    if type(event) is not RootCall or not event.left:
        return event.outputs
    return event.outputs[: -len(event.left)]


def results_at_hand(error: Exception, log: EventLog) -> list[Ref]:
    """The non-finite results among the variables of the frames that an error came through, else of the modules called."""
    found: list[Ref] = []
    entry = error.__traceback__
    while entry is not None:
        for value in locals_of(entry.tb_frame).values():
            if isinstance(value, Tensor) and value.is_floating_point() and is_immediate(value):
                ref = log.lookup(value)
                if ref is not None and not is_finite(value) and not _is_innocent(log, ref):
                    found.append(ref)
            elif isinstance(value, Tensor) and _was_no_number(value) and (ref := _before_cast(value, log)) is not None:
                found.append(ref)
        entry = entry.tb_next
    for event in log.record.events if not found else ():
        live = [(i, r()) for i, r in enumerate(_returned_by(event)) if isinstance(event, RootCall)]
        found += [Ref(event.index, i) for i, t in live if t is not None and is_immediate(t) and not is_finite(t)]
    return found


def _was_no_number(tensor: Tensor) -> bool:
    """Whether an integer tensor holds what a cast makes of NaN: the lowest number that there is."""
    if tensor.dtype not in (torch.int64, torch.int32) or not is_immediate(tensor) or not tensor.numel():
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _before_cast(tensor: Tensor, log: EventLog) -> Ref | None:
    """The floating result that an integer tensor was cast from, directly or by operators of one operand."""
    ref = log.lookup(tensor)
    while ref is not None:
        event = log.record.event(ref.event)
        if not isinstance(event, GlueOp) or ref.output >= len(event.floating) or event.floating[ref.output]:
            return ref if isinstance(event, (GlueOp, RootCall)) else None
        behind = refs_of(event)
        ref = behind[0] if len(behind) == 1 else None
    return None


def mode_of(record: StepRecord, first: Ref) -> Literal["train", "eval"]:
    """Whether an error ended a training step or an evaluation. `first`: the first bad result that the script had at hand.

    Preprocessing wants no gradient by itself: what was computed behind it tells, or else whether it ran with gradients on.
    """
    wanting = lineage.wanting_gradients(record)
    behind = [event for event in record.events if event.index >= first.event]
    if any(event.index in wanting for event in behind):
        return "train"
    if any(isinstance(e, RootCall) and e.error is not None and e.modes.grad and e.training for e in behind):
        return "train"  # (it has returned nothing that could want a gradient)
    has_no_call = not any(isinstance(event, RootCall) for event in behind)
    return "train" if has_no_call and any(isinstance(e, GlueOp) and e.grad for e in behind[:1]) else "eval"


def _is_innocent(log: EventLog, ref: Ref) -> bool:
    """Whether it is memory that was asked for and that nobody has written to yet, or bad because the script wrote it so."""
    event = log.record.event(ref.event)
    func = event.func if isinstance(event, GlueOp) else None
    is_unfilled = getattr(getattr(func, "overloadpacket", func), "__name__", None) in UNINITIALISED
    return is_unfilled or is_own_constant(log.record, ref, log.producers.writers)


def bad_outputs(root: RootCall) -> tuple[Ref, ...]:
    """Those of a module's results that are still there and not finite."""
    live = [(position, ref()) for position, ref in enumerate(_returned_by(root))]
    floating = [(position, t) for position, t in live if t is not None and t.is_floating_point()]
    return tuple(Ref(root.index, position) for position, t in floating if not is_finite(t))
