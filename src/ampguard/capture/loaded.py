"""Which weights `load_state_dict` has written, and at which line: a checkpoint, or an average that is swapped in."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampguard import compat
from ampguard.capture.record import Line
from ampguard.compat import version_of

MOST_LOADS = 16

Versions = dict[int, int]


@dataclass(slots=True)
class _Load:
    """`written`: the version of each tensor that was written, by its identity."""

    module: weakref.ref[nn.Module]
    line: Line | None
    written: Versions


class LoadedWeights:
    """The newest loads. Nothing is read but version counters."""

    def __init__(self) -> None:
        self._loads: deque[_Load] = deque(maxlen=MOST_LOADS)

    def note(self, module: nn.Module, before: Versions, line: Line | None) -> None:
        """`module` has loaded weights. `before`: what `versions` answered then."""
        written = {key: version for key, version in versions(module).items() if before.get(key) != version}
        self._loads = deque((load for load in self._loads if load.module() not in (None, module)), maxlen=MOST_LOADS)
        self._loads.append(_Load(weakref.ref(module), line, written))

    def line_of(self, tensor: Tensor) -> Line | None:
        """Where the values were loaded that this parameter or buffer holds, if it was not written to since."""
        for load in reversed(self._loads):
            module = load.module()
            if module is None or load.written.get(id(tensor)) != version_of(tensor):
                continue
            if any(t is tensor for t in compat.all_tensors(module)):
                return load.line
        return None


def versions(module: nn.Module) -> Versions:
    """How often each parameter and buffer of a module has been written to, by its identity."""
    return {id(t): version_of(t) for t in compat.all_tensors(module) if not is_lazy(t)}
