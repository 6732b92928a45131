"""The second rung of the ladder: operators watched while the step itself runs.

For steps that cannot be replayed (inputs changed in place, a call that uses up its argument, a computation that does
not repeat itself). Costly, so armed only after such a failure, for a limited number of steps. The script's operators
run as they are; only our notes about them pass through the fault barrier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from ampguard import compat
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.record import Event, RootCall
from ampguard.replay.names import module_names
from ampguard.replay.trace import Trace
from ampguard.replay.tracer import ReplayMode
from ampguard.replay.variants import AS_IT_RAN


class LiveMode(ReplayMode):
    """A tracer that never lets a fault of its own reach the operator that it watches."""

    def __init__(self, trace: Trace, names: dict[int, str], barrier: FaultBarrier) -> None:
        super().__init__(AS_IT_RAN, trace, names)
        self._barrier = barrier
        self._turn = threading.Lock()

    def takes_turn(self) -> bool:
        """Whether nobody else is watching with this mode, which may be on the stack of one thread only."""
        return self._turn.acquire(blocking=False)

    def end(self) -> None:
        try:
            super().end()
        finally:
            self._turn.release()

    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._barrier.call(self.enter_module, module)
        try:
            return original(module, *args, **kwargs)
        finally:
            self._barrier.call(self.leave_module)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        noted = self._barrier.call(self.note_before, func, args, kwargs)
        try:
            output = compat.run_counted(func, args, kwargs)
        except RuntimeError:
            if noted is not None:
                noted.op.refused = True
                noted.op.args, noted.op.kwargs = args, kwargs
            raise
        if noted is not None:
            self._barrier.call(self.note_after, noted, args, kwargs, output)
        return output


class LiveTracing:
    """Traces the operators of the running step into `trace`; begins anew after each backward pass."""

    def __init__(self, reason: str, modules: list[nn.Module], barrier: FaultBarrier) -> None:
        self.reason = reason
        self.barrier = barrier
        self._names: dict[int, str] = {}
        for module in modules:
            self._names |= module_names(module)
        self.begin_step()

    def begin_step(self) -> None:
        self.trace = Trace()
        self._mode = LiveMode(self.trace, self._names, self.barrier)

    def watch(self, event: Event) -> Watching:
        """A context in which what the event runs is traced."""
        return Watching(self, event)

    def enter(self, event: Event) -> LiveMode | None:
        mode = self._mode
        if not mode.takes_turn():
            return None  # another thread is followed since, or was
        mode.event = event
        if isinstance(event, RootCall) and id(event.module) not in self._names:
            self._names |= module_names(event.module, event.prefix)
        mode.begin()
        return mode


class Watcher(Protocol):
    """Whoever watches events while they run."""

    barrier: FaultBarrier

    def enter(self, event: Event) -> WatchingMode | None:
        """Begin to watch; the mode that does it, innermost on the thread's stack. None where that cannot be now."""


class WatchingMode(Protocol):
    """A dispatch mode that knows which module is running."""

    def end(self) -> None: ...
    def enter_module(self, module: nn.Module) -> None: ...
    def leave_module(self) -> None: ...
    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any: ...


class Watching:
    """One event watched. Where watching cannot begin, the event runs unwatched."""

    def __init__(self, watcher: Watcher, event: Event) -> None:
        self._watcher = watcher
        self._event = event
        self._mode: WatchingMode | None = None
        self._call: Any = None
        self._below: Any = None
        self._is_over = False

    def __enter__(self) -> None:
        if self._watcher.barrier.is_observed():
            return  # a mode of the script's own is on, and would end up on the wrong side of ours
        mode = self._mode = self._watcher.barrier.call(self._watcher.enter, self._event)
        if mode is None or not isinstance(self._event, RootCall):
            return
        self._watcher.barrier.call(mode.enter_module, self._event.module)
        below = nn.Module.__call__

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if self._is_over:
                return below(module, *args, **kwargs)
            return mode.call_module(below, module, args, kwargs)

        self._call, self._below = __call__, below
        nn.Module.__call__ = __call__  # type: ignore[method-assign]
        _watching[__call__] = self

    def __exit__(self, *exc: object) -> None:
        mode = self._mode
        self._is_over = True
        _take_off()
        if mode is not None:
            try:
                mode.end()
            except Exception as fault:  # not through the barrier's call, which would hide the mode that is to go
                self._watcher.barrier.trip(fault)
            if self._call is not None:
                self._watcher.barrier.call(mode.leave_module)


_watching: dict[Any, Watching] = {}
"""By what each has put in the place of `nn.Module.__call__`: another thread may have begun to watch, and end later."""


def _take_off() -> None:
    """Take what has come to its end off `nn.Module.__call__`, as far as nothing is on top of it."""
    while (top := _watching.get(nn.Module.__call__)) is not None and top._is_over:
        nn.Module.__call__ = top._below  # type: ignore[method-assign]
        del _watching[top._call]
