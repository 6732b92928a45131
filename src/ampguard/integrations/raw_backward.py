"""`loss.backward()` of a loss that was not scaled, in the place of the framework's own call.

Seen where it happens, by a hook on a sample of each optimizer's parameters; told when an optimizer is to step on what it
left, for a backward pass whose gradients are thrown away (an adversarial input, the first half of SAM) is no mistake.

The same hooks see which gradients carry the loss scale: the optimizer's own `step()` on these goes past the scaler.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine.misuse import Line
from ampguard.integrations.users_line import users_line

SAMPLE = 64
"""Parameters of an optimizer that are watched. A loss reaches some of them, or the optimizer is not what it trains."""


class Mark:
    """One parameter and its gradient as a backward pass of a scaled loss has left it. Keeps neither."""

    __slots__ = ("_gradient", "_parameter", "_version")

    def __init__(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        self._parameter = weakref.ref(parameter)
        self._gradient = weakref.ref(gradient) if gradient is not None else None
        self._version = compat.versions_of([gradient])[0] if gradient is not None else -1

    def is_of(self, parameter: Tensor) -> bool:
        return self._parameter() is parameter

    def holds(self) -> bool:
        parameter = self._parameter()
        gradient = parameter.grad if parameter is not None else None
        if gradient is None or self._gradient is None or self._gradient() is not gradient:
            return False
        return compat.versions_of([gradient])[0] == self._version

    def is_rewritten(self) -> bool:
        """Whether the gradient is there, and somebody has written into it since."""
        parameter = self._parameter()
        gradient = parameter.grad if parameter is not None else None
        is_same = gradient is not None and self._gradient is not None and self._gradient() is gradient
        return is_same and not self.holds()

    def again(self) -> Mark:
        """Of the gradient as it is now."""
        parameter = self._parameter()
        return Mark(parameter) if parameter is not None else self


class RawBackwards:
    """Which optimizers hold gradients of a loss that was not scaled, and the line where they came from."""

    def __init__(self, on_own_step: Callable[[Optimizer], None]) -> None:
        """`on_own_step`: told when a watched optimizer's own `step()` is called, before it steps."""
        self._on_own_step = on_own_step
        self._marks: dict[int, Mark] = {}
        self._scaled = 0
        self._is_scaled_by_hand = False
        self._lines: dict[int, Line | None] = {}
        self._handles: dict[int, list[Any]] = {}

    def watch(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Once per optimizer. Costs a call for each watched parameter in every backward pass."""
        if id(optimizer) in self._handles:
            return
        learning = [p for p in parameters if p.requires_grad and p.is_leaf]
        sample = learning[:: -(-len(learning) // SAMPLE) or 1]

        key = id(optimizer)

        def reached(p: Tensor) -> None:
            if not self._scaled and not self._is_scaled_by_hand:
                self._lines.setdefault(key, users_line())
            elif key not in self._marks or self._marks[key].is_of(p):
                self._marks[key] = Mark(p)

        def steps(own: Optimizer, *_: Any) -> None:
            self._on_own_step(own)

        handles: list[Any] = [p.register_post_accumulate_grad_hook(reached) for p in sample]
        with contextlib.suppress(AttributeError):  # a wrapper around an optimizer may have no hooks
            handles.append(optimizer.register_step_pre_hook(steps))
        self._handles[key] = handles

    @contextlib.contextmanager
    def scaled(self) -> Iterator[None]:
        """A backward pass of a scaled loss."""
        self._scaled += 1
        try:
            yield
        finally:
            self._scaled -= 1

    def scaled_begins(self, _: Tensor) -> None:
        """A hook on a scaled loss, for `scaler.scale(loss).backward()` in the script itself; holds until a step."""
        self._is_scaled_by_hand = not self._scaled

    def are_held(self, optimizer: Optimizer) -> bool:
        """Whether its gradients came, in part at least, from a loss that was not scaled."""
        return id(optimizer) in self._lines

    def are_scaled(self, optimizer: Optimizer) -> bool:
        """Whether they are those of a scaled loss for certain: nobody has divided, replaced or cleared them since."""
        mark = self._marks.get(id(optimizer))
        return mark is not None and mark.holds() and not self.are_held(optimizer)

    def are_rewritten(self, optimizer: Optimizer) -> bool:
        """Whether somebody has written into them since a scaled loss has made them, as clipping does."""
        mark = self._marks.get(id(optimizer))
        return mark is not None and mark.is_rewritten() and not self.are_held(optimizer)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around what the scaler itself writes: they stay gradients of a scaled loss."""
        held = [key for key, mark in self._marks.items() if mark.holds()]
        yield
        for key in held:
            self._marks[key] = self._marks[key].again()

    def line(self, optimizer: Optimizer) -> Line | None:
        return self._lines.get(id(optimizer))

    def look_again(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Somebody may have cleared such gradients since. Reads them, where there are any."""
        if self.are_held(optimizer):
            gradients = [p.grad for p in parameters if p.grad is not None]
            if not any(bool(torch.count_nonzero(g.detach())) for g in gradients):
                self.forget(optimizer)

    def forget(self, optimizer: Optimizer) -> None:
        """Its gradients were used or cleared."""
        self._lines.pop(id(optimizer), None)
        self._marks.pop(id(optimizer), None)
        self._is_scaled_by_hand = False

    def leave(self, optimizer: Optimizer) -> None:
        """Take the hooks off again."""
        self.forget(optimizer)
        for handle in self._handles.pop(id(optimizer), []):
            handle.remove()
