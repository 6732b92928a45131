"""Learning-rate schedulers that stand still while their optimizer's steps are skipped, whoever calls their `step`."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

logger = logging.getLogger("ampguard")


class StepsSince:
    """Whether any step was made since a scheduler last asked. Waits for the device when asked, not before."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._all_skipped: Tensor | None = None

    def stepped(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        if optimizer is self._optimizer:
            earlier = self._all_skipped
            self._all_skipped = found_inf if earlier is None else torch.minimum(earlier, found_inf)

    def may_advance(self) -> bool:
        """Not where every step since was skipped. A scheduler that is called without any step is let be."""
        all_skipped, self._all_skipped = self._all_skipped, None
        return all_skipped is None or not bool(all_skipped)


_gates: weakref.WeakKeyDictionary[Any, StepsSince] = weakref.WeakKeyDictionary()


@functools.cache
def _waiting(kind: Any) -> Any:
    """The scheduler's class with a `step` that asks first. Its state, and so its checkpoints, stay as they are."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        gate = _gates.get(self)
        if gate is None or gate.may_advance():
            return kind.step(self, *args, **kwargs)
        return None

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**names, "step": step, "__slots__": ()})


def let_wait(scheduler: Any) -> tuple[StepsSince, Callable[[], None]] | None:
    """Make a scheduler (ReduceLROnPlateau too) wait; what to tell of steps, and how to undo it.

    None where it has no optimizer, no `step`, or does not let its class be changed.
    """
    optimizer, kind = getattr(scheduler, "optimizer", None), type(scheduler)
    if not isinstance(optimizer, Optimizer) or not callable(getattr(scheduler, "step", None)) or scheduler in _gates:
        return None
    try:
        scheduler.__class__ = _waiting(kind)  # type: ignore[arg-type]
        gate = _gates[scheduler] = StepsSince(optimizer)
    except TypeError:
        scheduler.__class__ = kind
        logger.warning("%s cannot be made to wait for skipped steps", kind.__name__)
        return None

    def undo() -> None:
        _gates.pop(scheduler, None)
        scheduler.__class__ = kind

    return gate, undo
