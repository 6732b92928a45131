"""Bad gradients behind a finite loss: the step is made again with the fix, and its gradients are put in their place.

Where they overflow because of the loss scale alone, they are those at the largest scale at which they are finite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.record import BackwardCall, RootCall
from ampguard.numerics import is_finite
from ampguard.run.overrides.gradients import all_finite
from ampguard.run.overrides.lower_scale import LowerScale
from ampguard.run.overrides.remaking import Part, Remaking
from ampguard.stderr import say


@dataclass(frozen=True, slots=True)
class Before:
    """A backward pass that is about to run: of what, and the gradients that it will add to."""

    parts: list[Part]
    leaves: list[Tensor]
    gradients: list[Tensor | None]

    def is_finite_now(self) -> bool:
        """Whether all gradients are. Waits for the device."""
        return all_finite(leaf.grad for leaf in self.leaves if leaf.grad is not None)

    def without_spoilt(self) -> Before:
        """The same without leaves whose gradients were not finite before: those of a step that somebody has given up."""
        both = zip(self.leaves, self.gradients, strict=True)
        kept = [(leaf, gradient) for leaf, gradient in both if gradient is None or is_finite(gradient)]
        return Before(self.parts, [leaf for leaf, _ in kept], [gradient for _, gradient in kept])


class GradientsAgain:
    """Stands around `backward`."""

    def __init__(self, remaking: Remaking, leaves: Callable[[], Iterable[Tensor]]) -> None:
        """`leaves`: whatever may have a gradient."""
        self._remaking = remaking
        self._leaves = leaves
        self.scale = LowerScale(remaking.ledger)

    def before(self, losses: Sequence[Tensor]) -> Before | None:
        """Keep the gradients that a backward pass will add to (most loops have none there), and what made the losses."""
        parts = self._remaking.parts(losses) if self._remaking.may_act() else None
        with compat.unseen():
            if parts is None or not all(is_finite(loss) for loss in losses if compat.has_values(loss)):
                return None
        leaves = [leaf for leaf in self._leaves() if leaf.requires_grad]
        with torch.no_grad():
            gradients = [leaf.grad.clone() if leaf.grad is not None else None for leaf in leaves]
        return Before(parts, leaves, gradients)

    def after(self, before: Before, scale: object | None) -> None:
        """Backward has returned: where the gradients are bad, make the step again. `scale`: whose the loss scale is."""
        if not self._remaking.may_act() or before.is_finite_now():
            return
        before, call = before.without_spoilt(), self._plain_call()
        if call is None or before.is_finite_now():
            return
        is_fixed = self._remaking.is_healed_by(lambda: self._judge(before, call, scale))
        found = self._made_again(before, scale)
        while found is None and self._remaking.heal_more():
            is_fixed = True
            found = self._made_again(before, scale)
        if found is None:
            self._remaking.is_in_vain()
            return
        put(before, found)
        self._remaking.recorder.gradients.healed_in = self._remaking.recorder.steps.count
        if is_fixed:
            self._remaking.ledger.made_again.add(self._remaking.step)
            say(f"step {self._remaking.step} is made again with the fix: its gradients are finite")

    def _plain_call(self) -> BackwardCall | None:
        """The last backward pass, where it asked for nothing but the gradients of its losses."""
        events = self._remaking.recorder.log.record.events
        call = next((e for e in reversed(events) if isinstance(e, BackwardCall)), None)
        if call is None or call.create_graph or call.only is not None:
            return None
        return call if call.args[1] is None and call.args[2] is None else None

    def _judge(self, before: Before, call: BackwardCall, scale: object | None) -> None:
        value = compat.loss_scale(scale)
        factor = float(value) if value is not None else None
        parameters = [p for p in before.leaves if p.grad is not None]
        self._remaking.recorder.judge.gradients.are_bad(parameters, factor, is_held_off=True, since=call.index)

    def _made_again(self, before: Before, scale: object | None) -> list[Tensor | None] | None:
        """What the backward pass leaves in the leaves when the step is made again, if that is finite."""
        remaking = self._remaking
        made = remaking.compute([part.ref for part in before.parts])
        if made is None:
            return None
        losses = [remaking.scaled_as(part, made) for part in before.parts]
        if not all(is_finite(loss) and loss.requires_grad for loss in losses):
            return None
        try:
            with remaking.unrecorded(), self._same_buffers():
                return self.scale.finite_gradients(losses, before.leaves, scale, remaking.step)
        except RuntimeError as why:  # reentrant checkpointing insists on `backward`
            remaking.cannot(why)
            return None

    @contextlib.contextmanager
    def _same_buffers(self) -> Iterator[None]:
        """Checkpointing runs modules again in each backward pass, and with them their running statistics."""
        events = self._remaking.recorder.log.record.events
        modules = {id(event.module): event.module for event in events if isinstance(event, RootCall)}
        buffers = [(buffer, buffer.clone()) for module in modules.values() for buffer in compat.all_buffers(module)]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


@torch.no_grad()
def put(before: Before, found: Sequence[Tensor | None]) -> None:
    """The gradients that the backward pass was to leave."""
    for leaf, old, new in zip(before.leaves, before.gradients, found, strict=True):
        total = new if old is None else old if new is None else old + new
        if leaf.grad is None or total is None or total.layout != leaf.grad.layout:
            leaf.grad = total
        else:
            leaf.grad.copy_(total)
