"""The second rung of the ladder: operators watched while the step itself runs.

For steps that cannot be replayed (inputs changed in place, a call that uses up its argument, a computation that does
not repeat itself). Costly, so armed only after such a failure, for a limited number of steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from ampguard.capture.record import Event, RootCall
from ampguard.replay.names import module_names
from ampguard.replay.rebuild import traced_modules
from ampguard.replay.trace import Trace
from ampguard.replay.tracer import ReplayMode
from ampguard.replay.variants import AS_IT_RAN


class LiveTracing:
    """Traces the operators of the running step into `trace`; begins anew after each backward pass."""

    def __init__(self, reason: str, modules: list[nn.Module]) -> None:
        self.reason = reason
        self._names: dict[int, str] = {}
        for module in modules:
            self._names |= module_names(module)
        self.begin_step()

    def begin_step(self) -> None:
        self.trace = Trace()
        self._mode = ReplayMode(AS_IT_RAN, self.trace, self._names)

    @contextlib.contextmanager
    def watch(self, event: Event) -> Iterator[None]:
        """Trace what runs inside."""
        mode = self._mode
        mode.event = event
        if isinstance(event, RootCall):
            if id(event.module) not in self._names:
                self._names |= module_names(event.module, event.prefix)
            with traced_modules(mode), mode:
                yield
        else:
            with mode:
                yield
