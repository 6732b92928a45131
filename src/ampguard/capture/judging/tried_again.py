"""Calls that a script makes once more because it has seen that their results are not finite: outside autocast, say.

It has asked (`torch.isfinite(out).all()`), then calls the same module with the same tensors, and goes on with what that
gives.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ampguard.capture.events import lineage
from ampguard.capture.events.log import EventLog
from ampguard.capture.events.operands import held_by, refs_of
from ampguard.capture.record import BadResult, Event, Ref, RootCall
from ampguard.capture.root_calls.trees import tensors_in
from ampguard.compat import version_of

MOST_TIMES = 16
"""Calls more than the first that are waited for."""


class TriedAgain:
    """Waits for the second call of what the first has made bad."""

    def __init__(self) -> None:
        self.asked_at = -1
        """The event before which the script has asked last whether numbers are finite."""
        self._first: RootCall | None = None
        self._waited_since = -1
        """What `asked_at` was when a call was last waited for: it has asked again since, of that one."""
        self._times = 0

    def is_waited_for(self, bad: BadResult, module: nn.Module, given: tuple[Any, Any], log: EventLog) -> bool:
        """A call of this module begins, with these arguments. Whether it is the second one of what has made this."""
        root = _call_behind(bad)
        if root is None or root.module is not module or self.asked_at <= max(root.index, self._waited_since):
            return False
        self._times = self._times + 1 if root is self._first else 0
        tensors = set[tuple[int, int]]()
        for tensor in tensors_in(given):
            ref = log.lookup(tensor)
            tensors.add((id(tensor), version_of(tensor)) if ref is None else (-1 - ref.event, ref.output))
        if not tensors or tensors != _tensors(root) or self._times >= MOST_TIMES:
            return False
        self._first, self._waited_since = root, self.asked_at
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether a second call may be under way, or over."""
        return self._first is not None

    def ends(self) -> None:
        """What was bad is told, or nobody's business."""
        self._first = None

    def is_second(self, root: RootCall) -> bool:
        """Whether this call, whose results are finite, is the one that was waited for."""
        first = self._first
        if first is None or first.module is not root.module or first.index == root.index:
            return False
        return _tensors(first) == _tensors(root)

    def is_made_good(self, bad: BadResult, calls: Iterable[Event | None]) -> bool:
        """Whether a loss that was waited for is computed anew by these calls, from which the one comes that is differentiated."""
        if self._first is None or bad.kind != "loss" or _call_behind(bad) is not self._first:
            return False
        return any(isinstance(call, RootCall) and self.is_second(call) for call in calls)


def _call_behind(bad: BadResult) -> RootCall | None:
    """The last call of a module that an output of an evaluation, or a loss of training, comes from."""
    if bad.kind not in ("output", "loss") or (bad.kind == "loss" and bad.mode == "eval"):
        return None
    targets = [target.event for target in bad.targets if isinstance(target, Ref)]
    indices = set[int]().union(*(lineage.events_behind(bad.record, index) for index in targets))
    events = (bad.record.event(index) for index in sorted(indices, reverse=True))
    return next((event for event in events if isinstance(event, RootCall)), None)


def _tensors(call: RootCall) -> set[tuple[int, int]]:
    """The tensors that a call was given, as they were."""
    held = {(id(one.tensor), one.version) for one in held_by(call)}
    return held | {(-1 - ref.event, ref.output) for ref in refs_of(call)}
