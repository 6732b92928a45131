"""A step whose model needs other ranks, replayed from what the model returned on.

The call of a model whose parameters are spread over ranks cannot be run again by one of them. What the script computed
from its results (the loss) can, where those are still there and finite: the failure is then in that part.
"""

from __future__ import annotations

from torch import Tensor

from ampguard import compat
from ampguard.capture.events.log import EventLog
from ampguard.capture.record import BackwardCall, Event, Ref, RootCall
from ampguard.numerics import is_finite


def after_sharded_calls(events: list[Event], log: EventLog) -> tuple[list[Event], dict[Ref, Tensor]]:
    """The events without such calls, and copies of what these returned; all events where that would not do.

    It will not where gradients are wanted, or where a result is gone, was written to, or is not finite itself.
    """
    calls = [e for e in events if isinstance(e, RootCall) and not e.is_function and compat.needs_other_ranks(e.module)]
    results: dict[Ref, Tensor] = {}
    if not calls or any(isinstance(event, BackwardCall) for event in events):
        return events, {}
    for call in calls:
        for position, output in enumerate(call.outputs):
            tensor, ref = output(), Ref(call.index, position)
            if tensor is None or log.lookup(tensor) != ref or not is_finite(tensor):
                return events, {}
            results[ref] = tensor.detach().clone()
    left_out = {call.index for call in calls}
    return [event for event in events if event.index not in left_out], results
