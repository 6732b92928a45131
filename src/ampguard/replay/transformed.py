"""Derivatives that a transform of `torch.func` takes outside every module.

Their operators were taped one by one and are run again so, without autograd. Which operator each of them differentiates,
the numbers of autograd's nodes tell, as they were when it was taped; in forward mode (see `forward_mode`), their order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from ampguard.capture.record import Event, GlueOp
from ampguard.replay.trace import Trace, TracedOp


class TransformedNodes:
    """The operators outside modules that have run, by the numbers of their nodes."""

    def __init__(self) -> None:
        self.tangents: Mapping[int, int | None] = {}
        """For events that compute the tangents of forward-mode derivatives: the event that each of them differentiates."""
        self._by_event: dict[int, tuple[GlueOp, int]] = {}
        self._until: list[int] = []
        self._ran: list[tuple[GlueOp, int]] = []

    def note(self, event: Event | None, index: int) -> None:
        """The operator of this number is about to run."""
        if self.tangents and isinstance(event, GlueOp):
            self._by_event[event.index] = (event, index)
        if isinstance(event, GlueOp) and event.nodes and (not self._until or event.nodes >= self._until[-1]):
            self._until.append(event.nodes)  # (each thread counts its own)
            self._ran.append((event, index))

    def _differentiated(self, event: Event | None) -> tuple[GlueOp, int] | None:
        if not isinstance(event, GlueOp):
            return None
        if event.index in self.tangents:
            return self._by_event.get(self.tangents[event.index] or -1)
        if event.derivative is None or event.derivative < 0:
            return None
        at = bisect_right(self._until, event.derivative)
        return self._ran[at] if at < len(self._ran) and self._ran[at][0] is not event else None

    def _is_derivative(self, event: Event | None) -> bool:
        return isinstance(event, GlueOp) and (event.derivative is not None or event.index in self.tangents)

    def told(self, event: Event | None, op: TracedOp, trace: Trace) -> TracedOp:
        """`op`, as part of a derivative where it is: it is where the operator is that is differentiated."""
        if self._is_derivative(event):
            op.in_backward = True
            op.is_tangent = event is not None and event.index in self.tangents
            found = self._differentiated(event)
            if found is not None:
                forward = trace.ops[found[1]]
                op.forward, op.line, op.within = forward.index, forward.line, forward.within
        return op
