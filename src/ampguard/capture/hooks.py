"""Hooks that the script puts on tensors outside every module: a replayed backward pass must run them too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ampguard import compat
from ampguard.capture.events.log import EventLog
from ampguard.capture.record import Ref


@dataclass(slots=True)
class TensorHook:
    """A hook on a computed tensor: `made_by` is None where no recorded event made it.

    `handle` can remove the hook until the backward pass has run; after that it is None.
    """

    made_by: Ref | None
    index: int
    hook: Callable[[Tensor], Any]
    handle: Any

    @property
    def is_removed(self) -> bool:
        """Whether the script has taken the hook off before it could run."""
        hooks = self.handle.hooks_dict_ref() if self.handle is not None else None
        return hooks is not None and self.handle.id not in hooks


class TensorHooks:
    """The hooks on what the recorded events made. Most scripts have none."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.known: list[TensorHook] = []

    def add(self, tensor: Tensor, hook: Callable[[Tensor], Any], handle: Any) -> None:
        """A hook was registered. One on a leaf stays on the leaf, which a replay differentiates itself."""
        if tensor.grad_fn is not None:
            hook = getattr(
                hook, "of_script", hook
            )  # not what looks on: a replay puts back what the hook itself writes to
            self.known.append(TensorHook(self._log.lookup(tensor), self._log.next_index, hook, handle))

    def differentiated(self) -> None:
        """A backward pass has run: what was not removed has been called. Those of dropped events are forgotten."""
        if not self.known:
            return
        events = self._log.record.events
        first = min(events[0].index, self._log.iteration_start) if events else self._log.next_index
        self.known = [known for known in self.known if known.index >= first and not known.is_removed]
        for known in self.known:
            known.handle = None

    def of(self, event: int) -> list[tuple[int, Callable[[Tensor], Any]]]:
        """The hooks on an event's results: (which result, the hook), in the order of their registration."""
        own = (known for known in self.known if known.made_by is not None and known.made_by.event == event)
        return [(known.made_by.output, known.hook) for known in own if known.made_by is not None]

    def are_lost_since(self, event: int) -> bool:
        """Whether a hook was put on a tensor that no recorded event made."""
        return any(known.made_by is None and known.index >= event for known in self.known)


def watching(recorder: Any, hooks: TensorHooks) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What to put in place of `Tensor.register_hook`, made from the original."""

    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def register_hook(self: Tensor, hook: Callable[[Tensor], Any]) -> Any:
            calls = recorder.tape.calls
            # (PyTorch would hand it this very function.)
            is_aside = recorder.tape.is_on_stack and calls.step_aside(compat.function_modes_on())
            try:
                handle = original(self, hook)
            finally:
                if is_aside:
                    calls.come_back()
            if recorder.active and not recorder.paused and not recorder.counting:
                recorder.barrier.call(hooks.add, self, hook, handle)
            return handle

        return register_hook

    return watch
