"""What a module's calls depend on beside their arguments: random streams, buffers, plain state, where the module hangs.

Most modules' calls neither draw random numbers nor have buffers, and bind no attribute anew. Once that has been seen of
a module, its calls are usual: nothing is looked at but its mode, until they are looked at in full again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn

from ampguard.capture.record import RngStates, RootCall, SavedAttribute, SavedBuffer
from ampguard.capture.root_calls.attributes import AttributeWatch
from ampguard.capture.root_calls.buffers import BufferWatch, Poisoned
from ampguard.capture.root_calls.computed_state import ComputedState
from ampguard.capture.root_calls.surroundings import FROM_NOTHING, Prefixes, RandomStreams

USUAL_CALLS = 255
"""Calls of a module between two that are looked at in full."""


@dataclass(slots=True)
class _Usual:
    module: weakref.ref[nn.Module]
    training: bool
    prefix: str
    left: int


class CallContext:
    """Keeps what a root call depends on."""

    def __init__(self) -> None:
        self.random = RandomStreams()
        self.buffers = BufferWatch()
        self.attributes = AttributeWatch()
        self.computed = ComputedState()
        self._prefixes = Prefixes()
        self._usual: dict[int, _Usual] = {}

    def before_call(
        self, module: nn.Module, training: bool, frame: Any
    ) -> tuple[RngStates, list[SavedBuffer], str, list[SavedAttribute]]:
        """Random states, buffers, prefix and plain state of `module` as they stand; `frame` is the caller's."""
        again = False
        usual = self._usual.get(id(module))
        if usual is not None and usual.training is training and usual.module() is module:
            usual.left -= 1
            if usual.left > 0:
                return FROM_NOTHING, [], usual.prefix, []
            del self._usual[id(module)]
            again = True
        return (
            self.random.before_call(module, training, again),
            self.buffers.before_call(module, training, again),
            self._prefixes.of(module, frame),
            self.attributes.before_call(module, again),
        )

    def after_call(self, root: RootCall) -> list[Poisoned]:
        """Note what the call drew and changed; returns the buffers that it turned non-finite."""
        if root.rng is FROM_NOTHING and not root.buffers and not root.attributes:
            if id(root.module) not in self._usual:
                root.attributes = self.attributes.after_call(root.module, [])
                if root.attributes:
                    return []
                self._usual[id(root.module)] = _Usual(weakref.ref(root.module), root.training, root.prefix, USUAL_CALLS)
            return []
        self.random.after_call(root)
        if root.attributes:
            root.attributes = self.attributes.after_call(root.module, root.attributes)
        return self.buffers.after_call(root.module, root.buffers) if root.buffers else []
