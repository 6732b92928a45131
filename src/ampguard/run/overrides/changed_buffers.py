"""What forward passes write to buffers (running statistics), put back where the step that they belong to is held off.

A step that was not made is to be as if it had not been: BatchNorm has taken the bad batch in by then, and its NaN would
stay in the statistics for good.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.record import SavedBuffer
from ampguard.capture.root_calls.buffers import BufferWatch
from ampguard.numerics import is_finite


@dataclass(frozen=True, slots=True)
class _Before:
    """A buffer as it was before the first call of a window that changed it."""

    owner: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    value: Tensor

    def is_poisoned(self) -> bool:
        """Whether it has become non-finite since. Waits for the device."""
        now = self.owner.get(self.name)
        if now is None or not now.is_floating_point() or not compat.has_values(now):
            return False
        return not is_finite(now) and is_finite(self.value)

    def restore(self) -> None:
        self.tensor.copy_(self.value)
        self.owner[self.name] = self.tensor


class ChangedBuffers:
    """The buffers that calls of models have changed since the last step that was made, as they were before."""

    def __init__(self) -> None:
        self._watch = BufferWatch(asks=False)
        self._trained: dict[tuple[int, str], _Before] = {}
        self._computed: dict[tuple[int, str], _Before] = {}
        """Those of calls without gradients: a teacher's, a generator's, or statistics that the script computes anew."""
        self._is_used = False
        """Whether a step was made of these calls: the next call begins a window."""

    def before_call(self, module: nn.Module) -> list[SavedBuffer]:
        if self._is_used:
            self._clear()
        return self._watch.before_call(module, module.training)

    def after_call(self, module: nn.Module, saved: list[SavedBuffer]) -> None:
        """Keep what the call has changed."""
        kept = self._trained if torch.is_grad_enabled() else self._computed
        for buffer, now in self._watch.changed_by(module, saved):
            value = buffer.copy if buffer.copy is not None or now is buffer.tensor else buffer.tensor
            if value is not None:
                before = _Before(buffer.owner, buffer.name, buffer.tensor, value)
                kept.setdefault((id(buffer.owner), buffer.name), before)

    def stepped(self) -> None:
        """An optimizer has made a step of the calls."""
        self._is_used = True

    @torch.no_grad()
    def put_back(self, only_poisoned: bool) -> None:
        """The step is held off: give the buffers the values from before its calls.

        `only_poisoned`: those that are no longer finite, which is all that is done for calls without gradients.
        """
        only_poisoned = only_poisoned or self._is_used
        with compat.unseen():
            for before in self._trained.values():
                if not only_poisoned or before.is_poisoned():
                    before.restore()
            for before in self._computed.values():
                if before.is_poisoned():
                    before.restore()
        self._clear()

    def _clear(self) -> None:
        self._trained.clear()
        self._computed.clear()
        self._is_used = False
