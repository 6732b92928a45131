"""Weights and buffers that the script itself wrote to its modules in the failing step: a teacher's average, an ascent such
as SAM's, statistics that are computed anew before an evaluation.

A module's weights are given to a replay as they are now. Where such a write has made them bad, what it was computed from
belongs to the step, and the chain of bad values leads there.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from ampguard import compat
from ampguard.capture.record import BadResult, GlueOp, Held, Ref, RootCall, StepRecord
from ampguard.capture.recorder import FlightRecorder
from ampguard.numerics import is_finite

MOST_WRITES = 32
"""Of one statement that are followed to its first."""


def with_rewritten_weights(bad: BadResult, recorder: FlightRecorder) -> BadResult | None:
    """The same, with weights that are not finite as what the operators of this step that wrote them gave.

    None where there are none. A loop without an optimizer writes all its weights: what it wrote is the step before.
    """
    if recorder.steps.counts_backwards and not recorder.steps.attempts:
        return None
    changed = {root.index: new for root in bad.record.events if (new := _rewritten(root, bad.record)) is not None}
    if not changed:
        return None
    events = [changed.get(event.index, event) for event in bad.record.events]
    return dataclasses.replace(bad, record=dataclasses.replace(bad.record, events=events))


def _rewritten(root: object, record: StepRecord) -> RootCall | None:
    if not isinstance(root, RootCall) or root.is_function or root.swapped_state:
        return None
    weights = {name: weight for name, weight in compat.named_parameters(root.module).items() if _is_bad(weight)}
    buffers = {} if root.training else {name: b for name, b in compat.named_buffers(root.module).items() if _is_bad(b)}
    state = {**weights, **{name: b for name, b in buffers.items() if not _was_changed_by_a_call(b, root, record)}}
    written = {name: ref for name, p in state.items() if (ref := _last_write(p, root, record)) is not None}
    return dataclasses.replace(root, swapped_state=written, is_rewritten=True) if written else None


def _is_bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not is_finite(tensor.detach())


def _last_write(weight: Tensor, root: RootCall, record: StepRecord) -> Ref | None:
    """The last operator outside modules that wrote to it before this call, in this step; not to a part of it."""
    memory = compat.storage_key(weight)
    for event in reversed(record.events):
        if not (isinstance(event, GlueOp) and record.iteration_start <= event.index < root.index and event.args):
            continue
        if compat.positions_written(event.func) != {0}:
            continue
        target = event.args[0]
        tensor = record.tensor_behind(_first_written(target, record))
        if tensor is None or not (tensor is weight or compat.storage_key(tensor) == memory != 0):
            continue
        if isinstance(target, Held) and (target.value.dtype != weight.dtype or not is_finite(target.value.detach())):
            return None  # cast since, or bad before
        return Ref(event.index, 0) if tensor.shape == weight.shape else None
    return None


def _was_changed_by_a_call(buffer: Tensor, root: RootCall, record: StepRecord) -> bool:
    """Whether a call of a module has written to it last before this one: running statistics take in what they see."""
    for event in reversed(record.events):
        if event.index >= root.index or event.index < record.iteration_start:
            continue
        if isinstance(event, GlueOp) and event.args and compat.positions_written(event.func) == {0}:
            tensor = record.tensor_behind(_first_written(event.args[0], record))
            if tensor is not None and compat.storage_key(tensor) == compat.storage_key(buffer) != 0:
                return False
        if isinstance(event, RootCall) and any(s.tensor is buffer and s.copy is not None for s in event.buffers):
            return True
    return False


def _first_written(target: object, record: StepRecord) -> object:
    """What the first of several writes to one tensor wrote to (`weight.data.mul_(m).add_(p)`): its own name may be gone."""
    for _ in range(MOST_WRITES):
        event = record.event(target.event) if isinstance(target, Ref) else None
        if not isinstance(event, GlueOp) or not event.args or compat.positions_written(event.func) != {0}:
            break
        target = event.args[0]
    return target
